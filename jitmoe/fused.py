"""mega_moe(): the door. Check the arguments, plan, find the kernel, launch."""

from __future__ import annotations

from typing import NamedTuple

from jitmoe.plan import heuristics
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import QUANT_GROUP, MoeProblem
from jitmoe.run import arrays
from jitmoe.run.arrays import DeviceArray, check_array, check_rows, view
from jitmoe.run.driver import device_spec, is_capturing
from jitmoe.run.launch import Kernel, ParamBlock, load, loaded
from jitmoe.run.tma import encode_u8_map
from jitmoe.run.workspace import CaptureError, Workspace, implicit_workspace
from jitmoe.weights import ExpertWeights


def mega_moe(
    x,
    topk_ids,
    topk_weights,
    weights: ExpertWeights,
    *,
    out=None,
    stream=None,
    workspace: Workspace | None = None,
    plan: MegaMoePlan | None = None,
):
    """The mixture-of-experts feed-forward layer in one kernel launch.

    y[t] = sum over slots s of topk_weights[t, s] * w2[e] @ (silu(gate) * up), with gate and up =
    w13[e] @ x[t] and e = topk_ids[t, s]. Activations between the GEMMs are re-quantised to e4m3 per
    token and 128 channels.

    x             [num_tokens, hidden] bf16 (quantised inside per token and 128 channels), or a pair
                  of e4m3 [num_tokens, hidden] and f32 scales [num_tokens, hidden / 128]
    topk_ids      [num_tokens, top_k] int32 or int64; an id outside [0, num_experts) is an unused
                  slot
    topk_weights  [num_tokens, top_k] f32 or bf16
    weights       ExpertWeights
    out           [num_tokens, hidden] bf16, written in place (default: a new array of x's family)
    stream        an address or a CuPy or PyTorch stream (default: the current stream of x's
                  library)
    workspace     a Workspace (default: one for each device and stream)
    plan          a MegaMoePlan for these sizes (default: the heuristic's)

    Returns `out`. uint8 and uint16 arrays stand for e4m3 and bf16 of the same bits. The same inputs
    give the same bits. May be captured into a CUDA graph after one call, or `warmup`, outside.

    Raises TypeError for a host array; ValueError for shapes, dtypes, strides or devices that do not
    fit; CaptureError if a kernel must be built or memory allocated during capture; DeviceTimeout if
    an earlier launch hung; MemoryError, CompileError, DriverError.
    """
    x_rows, x_scale = x if isinstance(x, tuple) else (x, None)
    call = _check(x_rows, x_scale, topk_ids, topk_weights, weights, out)
    if out is None:
        out = arrays.empty_rows(
            call.num_tokens, weights.hidden, x_rows, call.x.family, weights.device
        )
    if call.num_tokens == 0:
        return out
    y = view(out, "out")
    if stream is None:
        stream = arrays.current_stream(call.x.family, weights.device)
    elif not isinstance(stream, int):
        stream = arrays.stream_address(stream)
    if workspace is None:
        workspace = implicit_workspace(weights.device, stream)
    elif workspace.device != weights.device:
        raise ValueError(
            f"the workspace is on GPU {workspace.device}, the weights are on GPU {weights.device}"
        )
    workspace.check()
    if plan is None:
        plan = _plan(weights, call.num_tokens, call.top_k)
    else:
        _check_plan(plan, weights, call.top_k)
    prepared = _prepare(weights, plan, workspace, call.num_tokens, stream)
    x_is_bf16 = x_scale is None
    scale = call.x_scale
    prepared.params.write(
        call.x.ptr,
        0 if x_is_bf16 else scale.ptr,
        call.topk_ids.ptr,
        call.topk_weights.ptr,
        *prepared.weight_scales,
        y.ptr,
        *prepared.memory,
        workspace.status_address,
        call.x.strides[0] * (2 if x_is_bf16 else 1),
        0 if x_is_bf16 else scale.strides[0],
        0 if x_is_bf16 else scale.strides[1],
        *prepared.scale_strides,
        y.strides[0],
        call.num_tokens,
        prepared.bank_words,
        prepared.row_capacity,
        x_is_bf16,
        call.topk_ids.dtype == "i64",
        call.topk_weights.dtype != "f32",
        workspace.timeout_us,
    )
    workspace.note_launch(stream)
    prepared.kernel.launch(prepared.params, stream)
    return out


def workspace_bytes(weights: ExpertWeights, num_tokens: int, top_k: int) -> int:
    """Device memory in bytes that a Workspace needs for calls of up to `num_tokens` tokens with
    these weights.
    """
    return _plan(weights, num_tokens, top_k).workspace_bytes(num_tokens)


def warmup(
    weights: ExpertWeights,
    top_k: int,
    num_tokens: int,
    *,
    workspace: Workspace | None = None,
    stream=None,
) -> list[Kernel]:
    """Build and load every kernel that calls of 1 to `num_tokens` tokens can need, and reserve the
    memory.

    After it such calls allocate and compile nothing, so they may be captured into a CUDA graph at
    once. `workspace` and `stream` must be those of the calls (default: CuPy's current stream and
    its implicit workspace). Returns the kernels.
    """
    address = (
        arrays.current_stream("cupy", weights.device)
        if stream is None
        else arrays.stream_address(stream)
    )
    workspace = workspace or implicit_workspace(weights.device, address)
    last = {_plan(weights, n, top_k): n for n in _bucket_edges(weights, num_tokens, top_k)}
    return [_prepare(weights, plan, workspace, n, address).kernel for plan, n in last.items()]


class _Call(NamedTuple):
    x: DeviceArray
    x_scale: DeviceArray | None
    topk_ids: DeviceArray
    topk_weights: DeviceArray
    num_tokens: int
    top_k: int


def _check(x_rows, x_scale, topk_ids, topk_weights, weights: ExpertWeights, out) -> _Call:
    if not isinstance(weights, ExpertWeights):
        raise TypeError(
            f"weights must be jitmoe.ExpertWeights, got {type(weights).__name__}; "
            "wrap the tensors in it"
        )
    hidden, device = weights.hidden, weights.device
    x = view(x_rows, "x")
    if x_scale is None and x.dtype in ("e4m3", "u8"):
        raise ValueError("x is e4m3 and has no scales; pass x=(x_fp8, x_scale)")
    check_array(
        x, "x", (None, hidden), ("bf16", "u16") if x_scale is None else ("e4m3", "u8"), device
    )
    check_rows(x, "x", 8 if x_scale is None else 16)
    num_tokens = x.shape[0]
    scale = None
    if x_scale is not None:
        scale = view(x_scale, "x_scale")
        check_array(scale, "x_scale", (num_tokens, hidden // QUANT_GROUP), ("f32",), device)
    ids, router = view(topk_ids, "topk_ids"), view(topk_weights, "topk_weights")
    check_array(ids, "topk_ids", (num_tokens, None), ("i32", "i64"), device)
    top_k = ids.shape[1]
    check_array(router, "topk_weights", (num_tokens, top_k), ("f32", "bf16", "u16"), device)
    for array, name in ((ids, "topk_ids"), (router, "topk_weights")):
        if num_tokens > 1 and array.strides != (top_k, 1):
            raise ValueError(
                f"{name} must be contiguous, got strides {list(array.strides)}; make it contiguous"
            )
    if out is not None:
        y = view(out, "out")
        check_array(y, "out", (num_tokens, hidden), ("bf16", "u16"), device)
        check_rows(y, "out", 8)
    return _Call(x, scale, ids, router, num_tokens, top_k)


def _decode_limit(weights: ExpertWeights, top_k: int) -> int:
    """The most tokens of the decode bucket."""
    key = ("decode_limit", top_k)
    if key not in weights.memo:
        problem = MoeProblem(0, weights.hidden, weights.intermediate, weights.num_experts, top_k)
        weights.memo[key] = heuristics.decode_limit(problem)
    return weights.memo[key]


def _plan(weights: ExpertWeights, num_tokens: int, top_k: int) -> MegaMoePlan:
    key = ("plan", num_tokens <= _decode_limit(weights, top_k), top_k)
    plan = weights.memo.get(key)
    if plan is None or num_tokens > 4096:
        problem = MoeProblem(
            num_tokens, weights.hidden, weights.intermediate, weights.num_experts, top_k
        )
        plan = weights.memo[key] = plan or heuristics.choose(problem, device_spec(weights.device))
    return plan


def _bucket_edges(weights: ExpertWeights, num_tokens: int, top_k: int) -> list[int]:
    limit = _decode_limit(weights, top_k)
    return [num_tokens] if num_tokens <= limit else [limit, num_tokens]


def _check_plan(plan: MegaMoePlan, weights: ExpertWeights, top_k: int) -> None:
    wanted = (weights.hidden, weights.intermediate, weights.num_experts, top_k)
    got = (plan.hidden, plan.intermediate, plan.num_experts, plan.top_k)
    if wanted != got:
        raise ValueError(
            f"the plan is for (hidden, intermediate, num_experts, top_k) = {got}, "
            f"the call has {wanted}; plan again"
        )


class _Prepared(NamedTuple):
    """What calls with the same weights, plan and memory share."""

    kernel: Kernel
    params: ParamBlock
    memory: tuple[int, ...]
    weight_scales: tuple[int, int]
    scale_strides: tuple[int, ...]
    bank_words: int
    row_capacity: int
    capacity: int
    generation: int


_SCRATCH = ("pool", "pool_scale", "row_pairs", "mid", "mid_scale", "slices")
_CONTROL = ("header", "banks", "combine_count")


def _prepare(weights, plan, workspace, num_tokens, stream) -> _Prepared:
    key = ("prepared", plan, workspace.serial)
    prepared = weights.memo.get(key)
    if (
        prepared is not None
        and prepared.generation == workspace.generation
        and prepared.capacity >= num_tokens
    ):
        return prepared
    import cupy

    with cupy.cuda.Device(weights.device):
        if loaded(plan, weights.device) is None and is_capturing(stream):
            raise CaptureError(
                f"the kernel of the {plan.bucket} bucket is not loaded, which a graph "
                "capture forbids; call jitmoe.warmup(...) or the layer itself once before capturing"
            )
        kernel = load(plan, weights.device)
        memory = workspace.reserve(plan, num_tokens, stream)
        params = ParamBlock(plan)
        row_capacity = plan.row_capacity(workspace.capacity(plan))
        params.write_maps(
            *_weight_maps(weights, plan), *_token_maps(weights, plan, memory, row_capacity)
        )
    w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
    prepared = weights.memo[key] = _Prepared(
        kernel,
        params,
        tuple(memory[name] for name in _SCRATCH + _CONTROL),
        (w13_scale.ptr, w2_scale.ptr),
        (w13_scale.strides[0], w2_scale.strides[0], w13_scale.strides[1], w2_scale.strides[1]),
        workspace.bank_words(plan),
        row_capacity,
        workspace.capacity(plan),
        workspace.generation,
    )
    return prepared


def _weight_maps(weights: ExpertWeights, plan: MegaMoePlan) -> tuple[bytes, bytes]:
    """Maps of w13 and w2 whose boxes are one tile of `block_rows` weight rows by 128 of K.

    The map of w13 has dimensions (hidden, 8 rows, gate | up, intermediate / 8, expert), so that one
    box lands gate and up in alternating groups of 8 rows, straight from [gate; up].
    """
    key = "weight_maps"
    if key not in weights.memo:
        w13, w2, half = weights.w13, weights.w2, weights.intermediate
        expert_13, row_13 = w13.strides[:2]
        expert_2, row_2 = w2.strides[:2]
        weights.memo[key] = (
            encode_u8_map(
                w13.ptr,
                [weights.hidden, 8, 2, half // 8, weights.num_experts],
                [row_13, half * row_13, 8 * row_13, expert_13],
                [plan.block_k, 8, 2, plan.block_rows // 16, 1],
            ),
            encode_u8_map(
                w2.ptr,
                [half, weights.hidden, weights.num_experts],
                [row_2, expert_2],
                [plan.block_k, plan.block_rows, 1],
            ),
        )
    return weights.memo[key]


def _token_maps(weights, plan: MegaMoePlan, memory: dict, row_capacity: int) -> tuple[bytes, ...]:
    """Prefill: maps of the pool and of mid, a box being the token side of a tile."""
    if not plan.split_tokens:
        return ()
    box = [plan.block_k, plan.block_tokens]
    widths = {"pool": weights.hidden, "mid": plan.derived_constants["mid_stride"]}
    return tuple(
        encode_u8_map(memory[name], [width, row_capacity], [width], box)
        for name, width in widths.items()
    )
