"""jitmoe and its peers as the same thing: calls that can be enqueued, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from jitmoe import reference
from jitmoe.measure import Call, launch_ranks, poisoned
from jitmoe.peers.peer import Peer
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.symmetric import LocalGroup
from jitmoe.run.workspace import Workspace
from jitmoe.weights import ExpertWeights

# By format. 2.2e-2 to 2.4e-2 is the own noise of FP8, 3e-3 that of bf16, a little more where few
# elements average.
JITMOE = {
    "fp8_block": Peer("jitmoe", is_block_fp8=True, max_error=3e-2),
    **{
        format: Peer("jitmoe", is_block_fp8=False, max_error=3e-2, formats=(format,))
        for format in ("fp8_channel", "fp8_tensor", "mxfp4_fp8")
    },
    **{
        format: Peer("jitmoe", is_block_fp8=False, max_error=5e-3, formats=(format,))
        for format in ("bf16", "mxfp4_bf16")
    },
}


@dataclass(frozen=True)
class Method:
    """Several calls on a stream of their own, over sets of weights in turn.

    stream     CuPy stream
    num_calls  how many
    call       call(i) enqueues call number i and returns y
    capture    () -> (launch, ys): launch() enqueues all calls as one graph, ys are their outputs
    bits       bits(y) is y as a CuPy array of bf16 bits, a view
    check      raises what the method has to say of calls that have run
    """

    stream: object
    num_calls: int
    call: Callable[[int], object]
    capture: Callable[[], tuple[Callable[[], None], list]]
    bits: Callable[[object], object]
    check: Callable[[], None]


def of_jitmoe(
    layer: MoeProblem,
    calls: list[Call],
    weights: list[ExpertWeights],
    plan: MegaMoePlan | None = None,
) -> Method:
    """Our kernel, of a plan or that of any call; outputs start poisoned."""
    workspace = Workspace(weights[0].device)

    def launch(i, y, stream):
        calls[i].launch(weights[i % len(weights)], workspace, y, stream, plan)

    return _ours([poisoned(layer) for _ in calls], launch, workspace.check)


def of_ranks(
    layer: MoeProblem,
    calls: list[Call],
    weights: list[list[ExpertWeights]],
    group: LocalGroup,
    presum: bool,
) -> Method:
    """Our kernel on the ranks of a group: `layer` and `calls` are those of all ranks together, the
    first tokens the first rank's, and each set of weights is by rank.
    """
    workspace = GroupWorkspace(group)
    by_rank = [call.of_ranks(group.num_ranks) for call in calls]

    def launch(i, y, stream):
        out = list(y.reshape(group.num_ranks, -1, y.shape[1]))
        launch_ranks(by_rank[i], weights[i % len(weights)], workspace, out, presum, stream)

    return _ours([poisoned(layer) for _ in calls], launch, workspace.check)


def _ours(ys: list, launch: Callable[[int, object, object], None], check) -> Method:
    """Of launch(i, y, stream), call number i into an output."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def call(i):
        launch(i, ys[i], stream)
        return ys[i]

    def capture():
        with stream:
            stream.begin_capture()
            for i in range(len(ys)):
                call(i)
            graph = stream.end_capture()
        return lambda: graph.launch(stream), ys

    return Method(stream, len(ys), call, capture, lambda y: y, check)


def of_peer(layer: MoeProblem, calls: list[Call], prepared: list[Callable]) -> Method:
    """A peer: what its `prepare` returned for each set of weights."""
    import cupy
    import torch

    torch_stream = torch.cuda.Stream()
    stream = cupy.cuda.ExternalStream(torch_stream.cuda_stream)
    arguments = [_torch_arguments(layer, call) for call in calls]
    cupy.cuda.Device().synchronize()

    def run(i):
        return prepared[i % len(prepared)](*arguments[i])

    def call(i):
        with _on(torch_stream):
            return run(i)

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, stream=torch_stream):
            ys = [run(i) for i in range(len(calls))]

        def launch():
            with _on(torch_stream):
                graph.replay()

        return launch, ys

    return Method(stream, len(calls), call, capture, _bits, lambda: None)


def prepare_peer(module, weights: list[ExpertWeights]) -> list[Callable]:
    """A peer's calls for each set of weights, in its own layout."""
    import torch

    with torch.no_grad():
        return [module.prepare(_torch_layer(one)) for one in weights]


@contextmanager
def _on(stream):
    import torch

    with torch.no_grad(), torch.cuda.stream(stream):
        yield


def _torch_layer(weights: ExpertWeights) -> reference.Layer:
    import torch

    w13, w2, w13_scale, w2_scale = weights.tensors
    scales = (
        scale if scale is None else torch.from_dlpack(scale) for scale in (w13_scale, w2_scale)
    )
    w13_scale, w2_scale = scales
    return reference.Layer(_torch_codes(w13), w13_scale, _torch_codes(w2), w2_scale)


def _torch_codes(codes):
    """CuPy codes or bits as torch's e4m3 or bf16."""
    import cupy
    import torch

    if codes.itemsize == 1:
        return torch.from_dlpack(codes).view(torch.float8_e4m3fn)
    return torch.from_dlpack(codes.view(cupy.int16)).view(torch.bfloat16)


def _torch_arguments(layer: MoeProblem, call: Call) -> tuple:
    import cupy
    import torch

    is_used = (call.topk_ids >= 0) & (call.topk_ids < layer.num_experts)
    ids = cupy.where(is_used, call.topk_ids, cupy.int32(-1))
    scale = None if call.scale is None else torch.from_dlpack(call.scale)
    rest = map(torch.from_dlpack, (ids, call.topk_weights))
    return _torch_codes(call.codes), scale, *rest


def _bits(y):
    """torch bf16 as the CuPy array of its bits."""
    import cupy
    import torch

    return cupy.from_dlpack(y.view(torch.int16)).view(cupy.uint16)
