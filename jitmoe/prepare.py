"""What calls with the same weights, plan and workspace share, made once: kernel, tensor maps,
addresses.
"""

from __future__ import annotations

from typing import NamedTuple

from jitmoe.plan.formats import format_of
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.run.arrays import DeviceArray
from jitmoe.run.driver import is_capturing
from jitmoe.run.launch import Kernel, ParamBlock, load, loaded
from jitmoe.run.tma import encode_u8_map
from jitmoe.run.workspace import CaptureError, Workspace
from jitmoe.weights import ExpertWeights


class Prepared(NamedTuple):
    """What calls with the same weights, plan and memory share."""

    kernel: Kernel
    params: ParamBlock
    memory: tuple[int, ...]
    scale_strides: tuple[int, ...]
    bank_words: int
    row_capacity: int
    capacity: int
    generation: int


MAX_WORKSPACES = 16  # remembered for a layer and plan; the oldest is prepared again

_SCRATCH = ("pool", "pool_scale", "row_pairs", "mid", "mid_scale", "slices", "parts")
_CONTROL = ("header", "banks", "combine_count")


def prepare(
    weights: ExpertWeights, plan: MegaMoePlan, workspace: Workspace, num_tokens: int, stream: int
) -> Prepared:
    """The kernel, loaded, and its parameters as far as calls of up to `num_tokens` tokens share
    them. Raises what `mega_moe` documents for kernels and memory.
    """
    known = weights.memo.setdefault(("prepared", plan), {})  # by workspace
    prepared = known.get(workspace.serial)
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
    if len(known) >= MAX_WORKSPACES:
        known.pop(next(iter(known)))
    prepared = known[workspace.serial] = Prepared(
        kernel,
        params,
        tuple(memory[name] for name in (*_SCRATCH, *["trace"] * plan.trace, *_CONTROL)),
        weights.scale_strides,
        workspace.bank_words(plan),
        row_capacity,
        workspace.capacity(plan),
        workspace.generation,
    )
    return prepared


def _weight_maps(weights: ExpertWeights, plan: MegaMoePlan) -> tuple[bytes, bytes]:
    """Maps of w13 and w2 whose boxes are one tile of `block_rows` weight rows by a k-block; of
    bytes, whatever the format.

    The map of w13 has dimensions (hidden, 8 channels, gate | up, intermediate / 8, expert), so that
    one box lands gate and up in alternating groups of 8 rows, whatever order they lie in. Without a
    gate it is as that of w2.
    """
    key = "weight_maps", plan.weight_k_bytes  # buckets may differ
    if key not in weights.memo:
        weights.memo[key] = (
            _gated_map(weights, plan) if weights.gated else _row_map(weights.w13, plan),
            _row_map(weights.w2, plan),
        )
    return weights.memo[key]


def _gated_map(weights: ExpertWeights, plan: MegaMoePlan) -> bytes:
    w13, half = weights.w13, weights.intermediate
    width, expert, row = _widths(w13, plan)
    channel, up = (2, 1) if plan.interleaved else (1, half)  # rows from one to the next
    return encode_u8_map(
        w13.ptr,
        [width, 8, 2, half // 8, weights.num_experts],
        [channel * row, up * row, 8 * channel * row, expert],
        [plan.weight_k_bytes, 8, 2, plan.block_rows // 16, 1],
    )


def _row_map(tensor: DeviceArray, plan: MegaMoePlan) -> bytes:
    """Dimensions (columns, rows, expert)."""
    width, expert, row = _widths(tensor, plan)
    num_experts, num_rows, _ = tensor.shape
    box = [plan.weight_k_bytes, plan.block_rows, 1]
    return encode_u8_map(tensor.ptr, [width, num_rows, num_experts], [row, expert], box)


def _widths(tensor: DeviceArray, plan: MegaMoePlan) -> tuple[int, int, int]:
    """Bytes of a row, and from expert to expert and row to row."""
    element = 2 if plan.format == "bf16" else 1
    return tuple(element * n for n in (tensor.shape[2], *tensor.strides[:2]))


def _token_maps(weights, plan: MegaMoePlan, memory: dict, row_capacity: int) -> tuple[bytes, ...]:
    """Prefill: maps of the pool and of mid, a box being half the token side of a tile, and the same
    with boxes of its extra tokens.
    """
    if not plan.split_tokens:
        return ()
    size = format_of(plan.format).element_bytes
    channels = {"pool": weights.hidden, "mid": plan.derived_constants["mid_stride"]}
    return tuple(
        encode_u8_map(memory[name], [size * n, row_capacity], [size * n], [plan.block_k_bytes, box])
        for box in plan.token_boxes.values()
        for name, n in channels.items()
    )
