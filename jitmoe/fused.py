"""mega_moe(): the door. Check the arguments, plan, find the kernel, launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jitmoe import fused_ranks
from jitmoe.arguments import Fit, check_call, read_call, split_x
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.spread import stride
from jitmoe.plan.variant import Activation, Variant
from jitmoe.planned import find_plan
from jitmoe.prepare import prepare
from jitmoe.run import families
from jitmoe.run.arrays import host_view, view
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.launch import Kernel, ParamBlock
from jitmoe.run.streams import current_stream, stream_address
from jitmoe.run.symmetric import Group, check_group
from jitmoe.run.workspace import Workspace, implicit_workspace
from jitmoe.weights import ExpertWeights


def mega_moe(
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
    expert_counts=None,
    stream=None,
    workspace: Workspace | GroupWorkspace | None = None,
    group: Group | None = None,
    max_num_tokens: int | None = None,
    presum: bool = False,
    expert_map=None,
    plan: MegaMoePlan | None = None,
    backend: str = "cuda",
):
    """The mixture-of-experts feed-forward layer in one kernel launch.

    y[t] = sum over slots s of topk_weights[t, s] * w2[e] @ mid, with mid = silu(gate) * up, or what
    `activation` says, gate and up = w13[e] @ x[t] and e = topk_ids[t, s] - first_expert.

    With FP8 weights, mid is re-quantised to e4m3 per token and 128 channels. With bf16 weights, it
    is multiplied by the router weight (unless that multiplies the token) and routed_scaling_factor
    in f32, then rounded to bf16: one rounding, as without them. Sums are in f32; each slot's row
    and y are rounded to bf16.

    x             [num_tokens, hidden] bf16 (FP8 weights: quantised inside per token and 128
                  channels), or, for FP8 weights, a pair of e4m3 [num_tokens, hidden] and f32
                  scales: [num_tokens, hidden / 128], one for each token [num_tokens] or
                  [num_tokens, 1], or one for all [1] or []
    topk_ids      [num_tokens, top_k] int32 or int64; an id outside [first_expert, first_expert +
                  num_experts) is an unused slot
    topk_weights  [num_tokens, top_k] f32 or bf16
    weights       ExpertWeights
    activation    an Activation, or the name of a kind: swiglu, swiglu_clamped, swiglu_oai,
                  geglu_tanh, geglu_erf, reglu2; or of experts without a gate, whose mid is that of
                  w13[e] @ x[t] alone: relu2_no_gate, silu_no_gate, gelu_tanh_no_gate,
                  gelu_erf_no_gate
    routed_scaling_factor
                  multiplies y
    apply_router_weight_on_input
                  whether topk_weights[t, s] multiplies x[t] for its expert instead of what comes of
                  it: gate and up before the activation
    first_expert  id of the first expert of `weights`, where ids count those of all ranks
    batch_invariant
                  whether a token gets the same bits whatever other tokens are in the call; costs
                  time where a call has few tiles, which are else cut along their sums, and with
                  MXFP4 weights where it has many tokens, for decode's kernel serves them too
    out           [num_tokens, hidden] bf16, written in place (default: a new array of x's family)
    expert_counts None, or [num_experts] int32, to which the call adds how many slots of its tokens
                  each expert of `weights` got, of all ranks' tokens in a group; whoever reads it
                  clears it
    stream        an address or a CuPy or PyTorch stream (default: the current stream of x's
                  library)
    workspace     a Workspace (default: one for each device and stream); of a group, a
                  GroupWorkspace (default: one for each group)
    group         a LocalGroup, PeerGroup or NcclGroup of ranks: `weights` are a rank's share of the
                  experts, of which rank r has ids from r * num_experts on, and tokens of all ranks
                  go to their experts and come back inside the launch. All ranks call alike. Of a
                  LocalGroup x, topk_ids, topk_weights and weights, and out and expert_counts if
                  given, are lists with an item a rank, and so is what is returned
    max_num_tokens
                  of a group: the most tokens of any rank in this call, the same on all ranks
                  (default in a LocalGroup: what the ranks have); a rank may have none
    presum        of a group: whether a rank adds up a token's rows before they travel: a third
                  fewer bytes over links at 8 slots and 8 ranks, for time of its own, and each
                  rank's sum is rounded to bf16. If not, bits are those of one rank that has all
                  experts
    expert_map    of a group: None, or int32 [num_logical_experts, max_replicas]: topk_ids name its
                  rows, and a row has the experts that do the same, r * num_experts + i for expert i
                  of rank r, then -1. Token t of rank r goes to number (r + t) modulo their count,
                  in all its slots; an id of no row, or of one without experts, is an unused slot.
                  Contents may change between calls; of a LocalGroup one array serves all ranks
    plan          a MegaMoePlan for these sizes (default: the heuristic's)
    backend       "cuda", or "emulated": the kernel an H200 would run, thread by thread on this CPU,
                  for NumPy arrays and ExpertWeights of such. Takes seconds for small layers, needs
                  a C++ compiler and no GPU; stream and workspace must be None, and y is uint16
                  where x is unsigned, else ml_dtypes.bfloat16

    A launch with few tokens, in the format of the weights, may begin while a kernel before it on
    the stream ends, if that kernel allows it (programmatic dependent launch; jitmoe's do, others
    only if written so). It then reads weights, and nothing else for good, before that kernel is
    over: whoever writes weights must not allow it.

    With biases, y[t] is the sum of topk_weights[t, s] * (w2[e] @ mid + w2_bias[e]), and w13_bias[e]
    is added to gate and up. apply_router_weight_on_input then multiplies w13[e] @ x[t] alone, and
    neither bias.

    A kernel is built for each function of activations, each apply_router_weight_on_input and each
    order of w13's rows, with and without biases, and for batch_invariant; none for numbers.

    Returns `out`. uint8 and uint16 arrays stand for e4m3 and bf16 of the same bits. The same call
    gives the same bits. May be captured into a CUDA graph after one call, or `warmup`, outside.

    Raises TypeError for a host array (emulated: for any other); ValueError for shapes, dtypes,
    strides or devices that do not fit; CaptureError if a kernel must be built or memory allocated
    during capture; DeviceTimeout if an earlier launch hung; MemoryError, CompileError, DriverError.
    Emulated, NoHostCompiler, HostCompileError and EmulationError of `jitmoe.emulate`.
    """
    wants = (
        *(activation, routed_scaling_factor, apply_router_weight_on_input),
        *(first_expert, batch_invariant),
    )
    if group is not None:
        check_group(group)
    is_alone = group is None or group.num_ranks == 1
    if is_alone and (expert_map is not None or (group is None and max_num_tokens is not None)):
        name = "max_num_tokens" if expert_map is None else "expert_map"
        raise ValueError(
            f"{name} is for a group of several ranks, the call has one; pass the group, or leave "
            "it out: ids are then those of the experts of `weights`"
        )
    if group is not None:
        given = {
            "x": x,
            "topk_ids": topk_ids,
            "topk_weights": topk_weights,
            "weights": weights,
            "out": out,
            "expert_counts": expert_counts,
        }
        if is_alone:
            options = {
                "activation": activation,
                "routed_scaling_factor": routed_scaling_factor,
                "apply_router_weight_on_input": apply_router_weight_on_input,
                "first_expert": first_expert,
                "batch_invariant": batch_invariant,
                "stream": stream,
                "plan": plan,
                "backend": backend,
            }
            return fused_ranks.run_alone(group, workspace, given, partial(mega_moe, **options))
        fused_ranks.check_free(plan=plan, backend=backend, first_expert=first_expert)
        return fused_ranks.run(
            group, workspace, max_num_tokens, presum, expert_map, given, wants, stream
        )
    if backend != "cuda":
        _check_emulated(backend, stream, workspace)
        return _emulated(x, topk_ids, topk_weights, weights, out, expert_counts, plan, wants)
    x_rows, x_scale = split_x(x)
    fit, x_ptr, scale_ptr, ids_ptr, router_ptr, y_ptr, counts_ptr = read_call(
        x_rows, x_scale, topk_ids, topk_weights, weights, out, expert_counts
    )
    if out is None:
        out = families.empty_rows(
            fit.num_tokens, weights.hidden, x_rows, fit.x.family, weights.device
        )
        y_ptr = view(out, "out").ptr
    if fit.num_tokens == 0:
        return out
    if stream is None:
        stream = current_stream(fit.x.family, weights.device)
    elif not isinstance(stream, int):
        stream = stream_address(stream)
    if workspace is None:
        workspace = implicit_workspace(weights.device, stream)
    elif workspace.device != weights.device:
        raise ValueError(
            f"the workspace is on GPU {workspace.device}, the weights are on GPU {weights.device}"
        )
    workspace.check()
    key = (fit, plan, wants)
    try:
        ready = workspace.ready.get(key)
    except TypeError:  # what has no hash is refused by name below
        ready = None
    ready = ready or _make_ready(weights, workspace, stream, *key)
    workspace.note_launch(stream)
    ready.write_addresses(
        x_ptr,
        scale_ptr,
        ids_ptr,
        router_ptr,
        *weights.scale_addresses,
        y_ptr,
        counts_ptr,
    )
    ready.kernel.launch(ready.params, stream, ready.cooperative)
    return out


class Ready(NamedTuple):
    """What calls of the same layouts, plan and workspace share: all of a launch but addresses.

    Parameters are a copy of its own, so that calls of other layouts cannot come between writing
    addresses and launching.
    """

    kernel: Kernel
    params: ParamBlock
    write_addresses: Callable[..., None]
    cooperative: bool


MAX_READY = 4096  # remembered for a workspace; then all are made ready again

_NO_ADDRESSES = (0,) * 8  # x to expert_counts, which every call writes


def _make_ready(
    weights: ExpertWeights,
    workspace: Workspace,
    stream: int,
    fit: Fit,
    plan: MegaMoePlan | None,
    wants: tuple,
) -> Ready:
    key = (fit, plan, wants)
    variant = Variant(*wants, **weights.variant_fields)
    plan = find_plan(weights, fit.num_tokens, fit.top_k, variant, plan)
    prepared = prepare(weights, plan, workspace, fit.num_tokens, stream)
    x_is_bf16 = fit.x_scale is None
    params = prepared.params.copy()
    params.write(
        *_NO_ADDRESSES,
        *prepared.memory,
        workspace.status_address,
        *weights.bias_fields,
        fit.x.strides[0] * (2 if x_is_bf16 else 1),
        *fit.x_scale_strides,
        *prepared.scale_strides,
        weights.hidden if fit.out is None else fit.out.strides[0],
        fit.num_tokens,
        prepared.bank_words,
        stride(prepared.kernel.grid),
        prepared.row_capacity,
        x_is_bf16,
        fit.topk_ids.dtype == "i64",
        fit.topk_weights.dtype != "f32",
        workspace.timeout_us,
        *variant.scalars(plan.format).values(),
    )
    if len(workspace.ready) >= MAX_READY:
        workspace.ready.clear()
    ready = workspace.ready[key] = Ready(
        prepared.kernel,
        params,
        params.address_writer(len(_NO_ADDRESSES)),
        plan.needs_whole_grid(fit.num_tokens, x_is_bf16),
    )
    return ready


def _check_emulated(backend, stream, workspace) -> None:
    """Refuse what another backend than "cuda" does not know."""
    if backend != "emulated":
        raise ValueError(f'backend must be "cuda" or "emulated", got {backend!r}')
    for name, value in (("stream", stream), ("workspace", workspace)):
        if value is not None:
            raise ValueError(
                f'{name} must be None for backend="emulated", which uses no GPU, '
                f"got {type(value).__name__}; leave it out"
            )


def _emulated(x, topk_ids, topk_weights, weights, out, expert_counts, plan, wants):
    """mega_moe() for backend="emulated": the same checks, the plan of an H200."""
    x_rows, x_scale = split_x(x)
    given = x_rows, x_scale, topk_ids, topk_weights, weights, out
    fit = check_call(*given, expert_counts, host_view)
    variant = Variant(*wants, **weights.variant_fields)
    if fit.num_tokens:
        plan = find_plan(weights, fit.num_tokens, fit.top_k, variant, plan)
    from jitmoe.fused_emulated import run

    return run(plan, *given, variant, expert_counts)
