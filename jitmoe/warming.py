"""What can be done before the first call: kernels built and loaded, memory reserved."""

from __future__ import annotations

from jitmoe.plan.variant import KINDS, Activation, Variant
from jitmoe.planned import find_plan, range_edges
from jitmoe.prepare import prepare
from jitmoe.run.arrays import view
from jitmoe.run.launch import Kernel
from jitmoe.run.streams import current_stream, stream_address
from jitmoe.run.workspace import Workspace, implicit_workspace
from jitmoe.weights import ExpertWeights


def workspace_bytes(weights: ExpertWeights, num_tokens: int, top_k: int) -> int:
    """Device memory in bytes that a Workspace needs for calls of up to `num_tokens` tokens with
    these weights; on an H200, if they are NumPy arrays.
    """
    weights.problem(num_tokens, top_k)  # refuses sizes there is no kernel for
    kind = next(kind for kind in KINDS if Activation(kind).gated == weights.gated)
    variant = Variant(kind, **weights.variant_fields)  # all kinds need as much
    edges = range_edges(weights, num_tokens, top_k, variant)
    last = {find_plan(weights, n, top_k, variant): n for n in edges}
    scratch = max(plan.scratch(n).num_bytes for plan, n in last.items())
    return scratch + sum(plan.control(n).num_bytes for plan, n in last.items())


def warmup(
    weights: ExpertWeights,
    top_k: int,
    num_tokens: int,
    *,
    activation: Activation | str = "swiglu",
    apply_router_weight_on_input: bool = False,
    batch_invariant: bool = False,
    workspace: Workspace | None = None,
    stream=None,
) -> list[Kernel]:
    """Build and load every kernel that calls of 1 to `num_tokens` tokens can need, and reserve the
    memory.

    After it such calls allocate and compile nothing, so they may be captured into a CUDA graph at
    once. `workspace` and `stream` must be those of the calls (default: CuPy's current stream and
    its implicit workspace), and so must `apply_router_weight_on_input`, `batch_invariant` and the
    kind of `activation`; its numbers and other arguments need no other kernels. Returns the
    kernels. Raises TypeError for weights in NumPy arrays.
    """
    view(weights.tensors[0], "w13")  # refuses NumPy's
    weights.problem(num_tokens, top_k)
    address = current_stream("cupy", weights.device) if stream is None else stream_address(stream)
    workspace = workspace or implicit_workspace(weights.device, address)
    variant = Variant(
        activation,
        apply_router_weight_on_input=apply_router_weight_on_input,
        batch_invariant=batch_invariant,
        **weights.variant_fields,
    )
    edges = range_edges(weights, num_tokens, top_k, variant)
    last = {find_plan(weights, n, top_k, variant): n for n in edges}
    return [prepare(weights, plan, workspace, n, address).kernel for plan, n in last.items()]
