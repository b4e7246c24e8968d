"""trace(): one launch of the layer that tells what every warp did, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jitmoe.arguments import check_call, split_x
from jitmoe.fused import mega_moe
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.variant import Activation, Variant
from jitmoe.planned import find_plan
from jitmoe.run.arrays import host_view, view
from jitmoe.run.driver import device_spec
from jitmoe.run.workspace import Workspace
from jitmoe.tracing.events import decode
from jitmoe.tracing.trace import Trace
from jitmoe.weights import ExpertWeights


def trace(
    x,
    topk_ids,
    topk_weights,
    weights: ExpertWeights,
    *,
    activation: Activation | str = "swiglu",
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    first_expert: int = 0,
    batch_invariant: bool = False,
    out=None,
    stream=None,
    plan: MegaMoePlan | None = None,
    backend: str = "cuda",
) -> Trace:
    """Run `mega_moe` once with the traced kernel of its plan, after a launch that warms up.

    Arguments are those of `mega_moe`, and so is what it raises; ValueError too without tokens, and
    PlanError if shared memory has no room for a traced plan. Waits for the device. A launch needs
    226 MB of GPU memory for its stamps beside the workspace; clearing them also empties the L2
    cache, so that weights come from memory. backend="emulated" counts the emulator's steps for
    time and warms nothing up.
    """
    is_emulated = backend == "emulated"
    if is_emulated and stream is not None:
        raise ValueError(
            'stream must be None for backend="emulated", which uses no GPU, '
            f"got {type(stream).__name__}; leave it out"
        )
    x_rows, x_scale = split_x(x)
    read = host_view if is_emulated else view
    fit = check_call(x_rows, x_scale, topk_ids, topk_weights, weights, out, read=read)
    if fit.num_tokens == 0:
        raise ValueError("x must have tokens for a trace, got none; pass one at least")
    gpu = gpu_spec("h200") if is_emulated else device_spec(weights.device)
    wants = {
        "activation": activation,
        "routed_scaling_factor": routed_scaling_factor,
        "apply_router_weight_on_input": apply_router_weight_on_input,
        "first_expert": first_expert,
        "batch_invariant": batch_invariant,
    }
    variant = Variant(**wants, **weights.variant_fields)
    plan = find_plan(weights, fit.num_tokens, fit.top_k, variant, plan)
    plan = replace(plan, trace=True)
    plan.check(gpu)
    if is_emulated:
        from jitmoe.fused_emulated import launch

        if out is None:
            out = np.empty((fit.num_tokens, weights.hidden), np.uint16)
        rings = launch(plan, x_rows, x_scale, topk_ids, topk_weights, weights, out, variant).rings
    else:
        options = wants | {"out": out, "stream": stream, "plan": plan}
        rings = _rings((x, topk_ids, topk_weights, weights), options)
    timeline = decode(rings, plan, "steps" if is_emulated else "ns")
    return Trace(**vars(timeline))


def _rings(arguments: tuple, options: dict) -> np.ndarray:
    """The stamps of a second launch in a workspace of its own."""
    import cupy

    device, plan = arguments[-1].device, options["plan"]
    workspace = Workspace(device)

    def launch():
        mega_moe(*arguments, **options, workspace=workspace)
        cupy.cuda.Device(device).synchronize()
        workspace.check()

    launch()
    region = plan.trace_rings(plan.max_blocks)
    start = plan.scratch(workspace.capacity(plan)).offsets["trace"]
    with cupy.cuda.Device(device) as current:
        rings = workspace.scratch[start : start + region.num_bytes]
        rings.fill(0)
        current.synchronize()
    launch()
    return rings.get().view(np.uint32).reshape(region.shape)
