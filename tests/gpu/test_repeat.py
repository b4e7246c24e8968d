"""State between launches: repetition, alternation, graphs, streams, time-outs, memory."""

import pytest

from jitmoe import CaptureError, DeviceTimeout, Workspace, mega_moe, warmup, workspace_bytes


@pytest.mark.parametrize("num_tokens", [3, 200, 1500])
def test_same_bits(make_layer, make_call, workspace, num_tokens):
    """Rows of an expert come in another order every time; results do not depend on it."""
    call = make_call(make_layer(16, 512, 256), num_tokens, 4, "zipf")
    first = call.run(call.fp8, workspace)
    for _ in range(50):
        assert (call.run(call.fp8, workspace) == first).all()


def test_alternating_calls(make_layer, make_call, workspace):
    """Both buckets, two layers, growing and shrinking batches in one workspace, back to back."""
    import cupy

    layers = [make_layer(16, 512, 256), make_layer(8, 384, 192)]
    calls = [make_call(layer, n, 3, seed=n) for n in (1, 1100, 40, 3000, 2) for layer in layers]
    alone = [call.run(call.fp8, Workspace(timeout_s=20)) for call in calls]
    outs = [cupy.full_like(y, 0xFFFF) for y in alone]
    for _ in range(5):
        for call, out in zip(calls, outs, strict=True):
            mega_moe(
                call.fp8,
                call.tokens.topk_ids,
                call.tokens.topk_weights,
                call.layer.weights,
                out=out,
                workspace=workspace,
            )
        cupy.cuda.Device().synchronize()
        workspace.check()
        for out, wanted in zip(outs, alone, strict=True):
            assert (out == wanted).all()
            out.fill(0xFFFF)


@pytest.mark.parametrize("num_tokens", [4, 1500])
def test_graph_replay_with_other_inputs(make_layer, make_call, num_tokens):
    """A captured call reads ids, weights and tokens anew at every replay."""
    import cupy

    layer = make_layer(16, 512, 256)
    calls = [
        make_call(layer, num_tokens, 4, routing, seed=seed)
        for seed, routing in enumerate(("uniform", "one_expert", "unused", "zipf"))
    ]
    codes, scale = (cupy.empty_like(array) for array in calls[0].fp8)
    ids, router = (cupy.empty_like(array) for array in calls[0].tokens[1:])
    out = cupy.empty((num_tokens, 512), cupy.uint16)
    workspace = Workspace(timeout_s=20)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        warmup(layer.weights, 4, num_tokens, workspace=workspace, stream=stream)
        stream.begin_capture()
        for _ in range(2):
            mega_moe((codes, scale), ids, router, layer.weights, out=out, workspace=workspace)
        graph = stream.end_capture()
        for call in calls * 2:
            workspace.scratch.fill(0xFF)
            out.fill(0xFFFF)
            sources = (*call.fp8, *call.tokens[1:])
            for target, source in zip((codes, scale, ids, router), sources, strict=True):
                target[...] = source
            graph.launch(stream)
            stream.synchronize()
            workspace.check()
            call.check(out, 4e-2)
    alone = calls[0].run(calls[0].fp8, Workspace(timeout_s=20))
    assert (calls[0].run(calls[0].fp8, workspace) == alone).all()


def test_growth_keeps_captured_memory(make_layer, make_call):
    """A larger batch after a capture moves the workspace; the old graph still has its memory."""
    import cupy

    layer = make_layer(16, 512, 256)
    small, large = make_call(layer, 4, 4), make_call(layer, 2500, 4)
    workspace, stream = Workspace(timeout_s=20), cupy.cuda.Stream(non_blocking=True)
    out = cupy.empty((4, 512), cupy.uint16)
    wanted = small.run(small.fp8, Workspace(timeout_s=20))
    with stream:
        warmup(layer.weights, 4, 4, workspace=workspace, stream=stream)
        stream.begin_capture()
        mega_moe(*(small.fp8,), *small.tokens[1:], layer.weights, out=out, workspace=workspace)
        graph = stream.end_capture()
        large.check(large.run(large.fp8, workspace), 4e-2)
        filler = [cupy.full(1 << 20, 0xFF, cupy.uint8) for _ in range(64)]
        graph.launch(stream)
        stream.synchronize()
        workspace.check()
        assert (out == wanted).all()
        del filler


def test_capture_before_warmup_is_refused(make_layer, make_call):
    import cupy

    layer = make_layer(7, 256, 128)  # of no other test: its kernels are not loaded
    call = make_call(layer, 4, 2)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = cupy.empty((4, 256), cupy.uint16)
        workspace = Workspace()
        stream.begin_capture()
        with pytest.raises(CaptureError, match="warmup"):
            mega_moe(call.fp8, *call.tokens[1:], layer.weights, out=out, workspace=workspace)
        with pytest.raises(CaptureError, match="warmup"):
            mega_moe(call.fp8, *call.tokens[1:], layer.weights, out=out)
        stream.end_capture()
        call.check(call.run(call.fp8, workspace), 4e-2)


def test_two_streams(make_layer, make_call):
    """Calls on two streams, each with its implicit workspace, do not meet."""
    import cupy

    layer = make_layer(16, 512, 256)
    calls = [make_call(layer, n, 4, seed=n) for n in (30, 1200)]
    wanted = [call.run(call.fp8, Workspace(timeout_s=20)) for call in calls]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]
    outs = [cupy.full_like(y, 0xFFFF) for y in wanted]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for call, stream, out in zip(calls, streams, outs, strict=True):
            mega_moe(call.fp8, *call.tokens[1:], layer.weights, out=out, stream=stream)
    cupy.cuda.Device().synchronize()
    for out, y in zip(outs, wanted, strict=True):
        assert (out == y).all()


@pytest.mark.parametrize("num_tokens", [4, 1500])
def test_timeout_is_an_error_and_reset_recovers(make_layer, make_call, num_tokens):
    """Counters that no launch left so make GEMM 2 wait for ever: the kernel ends, the context
    lives, the error says who waited, reset() recovers.
    """
    import cupy

    call = make_call(make_layer(16, 512, 256), num_tokens, 4)
    workspace = Workspace(timeout_s=0.2)
    call.check(call.run(call.fp8, workspace), 4e-2)
    ((plan, (capacity, control)),) = workspace._controls.items()
    words = plan.bank_words(capacity)
    banks = control[plan.control(capacity).offsets["banks"] :].view(cupy.uint32)
    # kBankBlocks of templates/roles/bank.cuh
    block_counters = 128 + 3 * plan.max_blocks + plan.num_experts
    for bank in (0, 1):
        banks[bank * words + block_counters : (bank + 1) * words] = 7
    with pytest.raises(DeviceTimeout, match="still waited for .* GEMM 1 tiles of block"):
        call.run(call.fp8, workspace)
    with pytest.raises(DeviceTimeout, match="reset"):
        call.run(call.fp8, workspace)
    workspace.reset()
    call.check(call.run(call.fp8, workspace), 4e-2)


@pytest.mark.parametrize("num_tokens", [4, 1500])
def test_workspace_contents_do_not_matter(make_layer, make_call, workspace, num_tokens):
    call = make_call(make_layer(16, 512, 256), num_tokens, 4)
    wanted = call.run(call.fp8, workspace)
    for byte in (0x00, 0x7F, 0x38):
        workspace.scratch.fill(byte)
        y = wanted.copy()
        y.fill(0)
        mega_moe(call.fp8, *call.tokens[1:], call.layer.weights, out=y, workspace=workspace)
        assert (y == wanted).all()


@pytest.mark.parametrize("num_tokens", [1, 50, 2000])
def test_workspace_bytes(make_layer, num_tokens):
    """What workspace_bytes promises is what a workspace takes, but for rounding up."""
    weights = make_layer(16, 512, 256).weights
    workspace = Workspace()
    warmup(weights, 4, num_tokens, workspace=workspace)
    promised = workspace_bytes(weights, num_tokens, 4)
    rounded = workspace_bytes(weights, -(-num_tokens // 64) * 64, 4)
    assert promised <= workspace.num_bytes <= rounded
