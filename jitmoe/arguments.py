"""What mega_moe() is given: read, and refused in a sentence where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jitmoe.plan.problem import QUANT_GROUP
from jitmoe.run.arrays import DeviceArray, check_array, check_contiguous, check_rows, view
from jitmoe.weights import ExpertWeights

MAX_X_BYTES = 1 << 36  # row offsets are 32-bit numbers of 16 bytes in the kernel


class Call(NamedTuple):
    """Arguments that were read and found right."""

    x: DeviceArray
    x_scale: DeviceArray | None
    topk_ids: DeviceArray
    topk_weights: DeviceArray
    out: DeviceArray | None
    num_tokens: int
    top_k: int


def split_x(x) -> tuple:
    """x as rows and their scales (None if there are none)."""
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise ValueError(
            f"x must be an array or a pair (x_fp8, x_scale), got a tuple of {len(x)}; "
            "pass the rows and their scales"
        )
    return x


def read_call(
    x, x_scale, topk_ids, topk_weights, weights: ExpertWeights, out, read: Callable = view
) -> Call:
    """Read the arguments, each by `read`: `view`, or `host_view` for NumPy arrays.

    A combination of layouts is checked once, addresses always.
    """
    if not isinstance(weights, ExpertWeights):
        raise TypeError(
            f"weights must be jitmoe.ExpertWeights, got {type(weights).__name__}; "
            "wrap the tensors in it"
        )
    x = read(x, "x")
    scale = None if x_scale is None else read(x_scale, "x_scale")
    ids, router = read(topk_ids, "topk_ids"), read(topk_weights, "topk_weights")
    y = None if out is None else read(out, "out")
    layouts = (
        x.layout,
        None if scale is None else scale.layout,
        ids.layout,
        router.layout,
        None if y is None else y.layout,
    )
    sizes = weights.calls.get(layouts)
    if sizes is None or (x.ptr if y is None else x.ptr | y.ptr) % 16:
        read(weights.tensors[0], "w13")  # refuses host weights on a GPU, and the reverse
        sizes = weights.calls[layouts] = _check(x, scale, ids, router, y, weights)
    if y is not None:
        x_end, y_end = x.ptr + x.layout.num_bytes, y.ptr + y.layout.num_bytes
        if x.ptr < y_end and y.ptr < x_end:
            raise ValueError(
                f"out, {y.ptr:#x} to {y_end:#x}, overlaps x, {x.ptr:#x} to {x_end:#x}, which is "
                "still read while rows are written; pass memory of its own"
            )
    return Call(x, scale, ids, router, y, *sizes)


def _check(x, scale, ids, router, out, weights: ExpertWeights) -> tuple[int, int]:
    """num_tokens and top_k of arguments that fit each other and the weights."""
    hidden, device = weights.hidden, weights.device
    if scale is None and x.dtype in ("e4m3", "u8"):
        raise ValueError("x is e4m3 and has no scales; pass x=(x_fp8, x_scale)")
    formats = ("bf16", "u16") if scale is None else ("e4m3", "u8")
    remedy = "pass rows of as many channels as the weights' hidden"
    check_array(x, "x", (None, hidden), formats, device, remedy)
    check_rows(x, "x", 8 if scale is None else 16)
    num_tokens = x.shape[0]
    if num_tokens * x.strides[0] * (2 if scale is None else 1) >= MAX_X_BYTES:
        raise ValueError(
            f"x must lie within {MAX_X_BYTES >> 30} GiB, got {num_tokens:,} rows {x.strides[0]:,} "
            "elements apart; copy it"
        )
    if scale is not None:
        remedy = "pass one scale for each token and 128 channels"
        groups = hidden // QUANT_GROUP
        check_array(scale, "x_scale", (num_tokens, groups), ("f32",), device, remedy)
    remedy = "pass a row of expert numbers for each row of x"
    check_array(ids, "topk_ids", (num_tokens, None), ("i32", "i64"), device, remedy)
    top_k = ids.shape[1]
    remedy = "pass one weight for each of topk_ids"
    formats = ("f32", "bf16", "u16")
    check_array(router, "topk_weights", (num_tokens, top_k), formats, device, remedy)
    weights.problem(num_tokens, top_k)  # refuses sizes there is no kernel for
    check_contiguous(ids, "topk_ids")
    check_contiguous(router, "topk_weights")
    if out is not None:
        remedy = "pass an array of the shape of x"
        check_array(out, "out", (num_tokens, hidden), ("bf16", "u16"), device, remedy)
        check_rows(out, "out", 8)
        if num_tokens > 1 and out.strides[0] < hidden:
            raise ValueError(
                f"rows of out overlap: {hidden} elements long, {out.strides[0]} apart; "
                "pass rows of their own"
            )
    return num_tokens, top_k
