"""Decode launches that overlap: with each other, with kernels that write their inputs, with other
streams.
"""

import pytest

from jitmoe import Workspace, mega_moe

# Lets the next launch start at once, and writes its inputs much later.
LATE = r"""
extern "C" __global__ void late(int* ids, const int* new_ids, int num_ids, unsigned char* x,
                                const unsigned char* new_x, int num_bytes, unsigned long long ns) {
    asm volatile("griddepcontrol.launch_dependents;");
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < ns);
    for (int i = threadIdx.x; i < num_ids; i += blockDim.x) ids[i] = new_ids[i];
    for (int i = threadIdx.x; i < num_bytes; i += blockDim.x) x[i] = new_x[i];
}
"""


def launch(call, workspace, out, **changes):
    given = {"x": call.fp8, "topk_ids": call.tokens.topk_ids, "stream": None} | changes
    mega_moe(
        given["x"],
        given["topk_ids"],
        call.tokens.topk_weights,
        call.layer.weights,
        out=out,
        workspace=workspace,
        stream=given["stream"],
    )


@pytest.mark.parametrize("sizes", [(16, 512, 256), (2, 512, 4224)])
def test_back_to_back(make_layer, make_call, workspace, sizes):
    """Hundreds in one workspace, of several sizes and routings, none waited for."""
    import cupy

    layer = make_layer(*sizes)
    top_k = min(4, sizes[0])
    routings = ("uniform", "one_expert", "unused", "zipf")
    counts = (1, 30, 7, 64, 2, 100)
    calls = [make_call(layer, n, top_k, routings[i % 4], seed=i) for i, n in enumerate(counts)]
    alone = [call.run(call.fp8, Workspace(timeout_s=20)) for call in calls]
    for _ in range(5):
        outs = [[cupy.full_like(y, 0xFFFF) for y in alone] for _ in range(8)]
        cupy.cuda.Device().synchronize()
        for some in outs:
            for call, out in zip(calls, some, strict=True):
                launch(call, workspace, out)
        cupy.cuda.Device().synchronize()
        workspace.check()
        for some in outs:
            for out, wanted in zip(some, alone, strict=True):
                assert (out == wanted).all()


@pytest.mark.parametrize("num_tokens", [1, 60])
@pytest.mark.parametrize("late_us", [0, 5, 100])
def test_inputs_that_come_late(make_layer, make_call, workspace, num_tokens, late_us):
    """A kernel before the layer lets it start and then writes its ids and tokens."""
    import cupy

    layer = make_layer(16, 512, 256)
    before, after = (make_call(layer, num_tokens, 4, "uniform", seed=s) for s in (1, 2))
    wanted = after.run(after.fp8, Workspace(timeout_s=20))
    kernel = cupy.RawKernel(LATE, "late")
    for _ in range(10):
        ids, (codes, scale) = before.tokens.topk_ids.copy(), after.fp8
        x = before.fp8[0].copy()
        out = cupy.full_like(wanted, 0xFFFF)
        cupy.cuda.Device().synchronize()
        new_ids = after.tokens.topk_ids
        num_words = ids.nbytes // 4
        kernel(
            (1,),
            (256,),
            (ids, new_ids, num_words, x, codes, x.nbytes, cupy.uint64(late_us * 1000)),
        )
        launch(after, workspace, out, x=(x, scale), topk_ids=ids)
        cupy.cuda.Device().synchronize()
        workspace.check()
        assert (out == wanted).all()


def test_two_streams(make_layer, make_call):
    """Launches of two streams share the GPU, of which none is sure of all SMs; one goes first."""
    import cupy

    layer = make_layer(16, 512, 256)
    calls = [make_call(layer, n, 4, "uniform", seed=n) for n in (8, 40)]
    alone = [call.run(call.fp8, Workspace(timeout_s=20)) for call in calls]
    low, high = (
        cupy.cuda.Stream(non_blocking=True),
        cupy.cuda.Stream(non_blocking=True, priority=-5),
    )
    workspaces = [Workspace(timeout_s=20) for _ in calls]
    outs = [[cupy.full_like(y, 0xFFFF) for _ in range(100)] for y in alone]
    cupy.cuda.Device().synchronize()
    for i in range(100):
        for stream, call, workspace, some in zip((low, high), calls, workspaces, outs, strict=True):
            launch(call, workspace, some[i], stream=stream)
    cupy.cuda.Device().synchronize()
    for workspace, some, wanted in zip(workspaces, outs, alone, strict=True):
        workspace.check()
        for out in some:
            assert (out == wanted).all()
