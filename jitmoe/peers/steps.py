"""Steps around a peer's grouped GEMMs, as Triton kernels: gather, SwiGLU, combine.

Each reads and writes its rows once, as a good pipeline does. Imported where a peer is run.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
COMBINE_CHANNELS = 1024


class Pairs(NamedTuple):
    """Used slots sorted by expert, the unused after them.

    tokens  [num_slots] the token of each sorted pair
    ends    int32 [num_experts] where each expert's pairs end
    places  [num_tokens, top_k] where a slot's pair is; -1 for an unused slot
    """

    tokens: object
    ends: object
    places: object


def sort_pairs(topk_ids, num_experts: int) -> Pairs:
    import torch

    is_used = topk_ids >= 0
    experts, order = torch.sort(torch.where(is_used, topk_ids, num_experts).flatten(), stable=True)
    every = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return Pairs(
        order // topk_ids.shape[1],
        torch.searchsorted(experts, every, right=True, out_int32=True),
        torch.where(is_used, places.view(topk_ids.shape), -1),
    )


def gather(x, x_scale, tokens, quantize: bool):
    """Rows of x for each pair: e4m3 with a scale for each row, or bf16 and None."""
    rows, scale = _empty(len(tokens), x.shape[1], x.device, quantize)
    _gather[(len(tokens),)](
        x,
        x_scale,
        tokens,
        rows,
        scale,
        x.shape[1],
        x_scale.shape[1],
        triton.next_power_of_2(x.shape[1]),
        quantize,
        num_warps=8,
    )
    return rows, scale


def swiglu(gate_up, quantize: bool):
    """silu(gate) * up of bf16 [num_pairs, 2 * intermediate], in the formats of `gather`."""
    num_pairs, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    rows, scale = _empty(num_pairs, intermediate, gate_up.device, quantize)
    block = triton.next_power_of_2(intermediate)
    _swiglu[(num_pairs,)](gate_up, rows, scale, intermediate, block, quantize, num_warps=8)
    return rows, scale


def combine(rows, places, topk_weights):
    """y bf16 [num_tokens, hidden], the weighted sum of each token's rows."""
    num_tokens, top_k = places.shape
    hidden = rows.shape[1]
    y = rows.new_empty(num_tokens, hidden)
    grid = (num_tokens, triton.cdiv(hidden, COMBINE_CHANNELS))
    _combine[grid](rows, places, topk_weights, y, hidden, top_k, COMBINE_CHANNELS)
    return y


def _empty(num_rows, num_cols, device, quantize):
    import torch

    dtype = torch.float8_e4m3fn if quantize else torch.bfloat16
    rows = torch.empty(num_rows, num_cols, dtype=dtype, device=device)
    return rows, torch.empty(num_rows, dtype=torch.float32, device=device) if quantize else None


@triton.jit
def _store(values, rows, scale, cols, num_cols, quantize: tl.constexpr):
    """One row, quantised by its largest value or as it is."""
    row = tl.program_id(0)
    at = rows + row.to(tl.int64) * num_cols + cols
    if quantize:
        amax = tl.maximum(tl.max(tl.abs(values), 0), 1e-10)
        tl.store(scale + row, amax / E4M3_MAX)
        values = values * (E4M3_MAX / amax)
    tl.store(at, values.to(rows.dtype.element_ty), mask=cols < num_cols)


@triton.jit
def _gather(
    x,
    x_scale,
    tokens,
    rows,
    scale,
    hidden,
    num_groups,
    block: tl.constexpr,
    quantize: tl.constexpr,
):
    token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    cols = tl.arange(0, block)
    mask = cols < hidden
    codes = tl.load(x + token * hidden + cols, mask=mask)
    group_scale = tl.load(x_scale + token * num_groups + cols // 128, mask=mask, other=0.0)
    values = tl.where(mask, codes.to(tl.float32) * group_scale, 0.0)
    _store(values, rows, scale, cols, hidden, quantize)


@triton.jit
def _swiglu(gate_up, rows, scale, intermediate, block: tl.constexpr, quantize: tl.constexpr):
    cols = tl.arange(0, block)
    mask = cols < intermediate
    at = gate_up + tl.program_id(0).to(tl.int64) * 2 * intermediate + cols
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + intermediate, mask=mask, other=0.0).to(tl.float32)
    _store(gate * tl.sigmoid(gate) * up, rows, scale, cols, intermediate, quantize)


@triton.jit
def _combine(rows, places, weights, y, hidden, top_k: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for slot in range(top_k):
        place = tl.load(places + token * top_k + slot).to(tl.int64)
        weight = tl.load(weights + token * top_k + slot)
        mask = (cols < hidden) & (place >= 0)  # rows of unused slots were never written
        total += weight * tl.load(rows + place * hidden + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + token * hidden + cols, total.to(y.dtype.element_ty), mask=cols < hidden)
