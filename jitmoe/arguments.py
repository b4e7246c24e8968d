"""What mega_moe() is given: read, and refused in a sentence where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jitmoe.plan.formats import format_of
from jitmoe.plan.scales import token_strides
from jitmoe.run.arrays import Layout, check_array, check_contiguous, check_rows, signer, view
from jitmoe.weights import ExpertWeights

MAX_X_BYTES = 1 << 36  # row offsets are 32-bit numbers of 16 bytes in the kernel


@dataclass(frozen=True, eq=False, slots=True)
class Fit:
    """Layouts of arguments that fit each other and the weights. Calls that agree in them share one,
    known by identity.
    """

    x: Layout
    x_scale: Layout | None
    topk_ids: Layout
    topk_weights: Layout
    out: Layout | None
    num_tokens: int
    top_k: int

    @property
    def x_scale_strides(self) -> tuple[int, int]:
        """In elements, from token to token and from group to group of 128 channels."""
        if self.x_scale is None:
            return 0, 0
        shape, strides = self.x_scale.shape, self.x_scale.strides
        return token_strides(shape, strides, self.num_tokens, self.x.shape[1])


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
    x, x_scale, topk_ids, topk_weights, weights: ExpertWeights, out, expert_counts=None
) -> tuple[Fit, int, int, int, int, int, int]:
    """Layouts that fit, then the addresses of x, x_scale, topk_ids, topk_weights, out and
    expert_counts; 0 for None.

    A combination of layouts is checked once, addresses always.
    """
    _check_wrapped(weights)
    x_ptr, x_signature = signer(type(x))(x, "x")
    scale_ptr, scale_signature = 0, None
    if x_scale is not None:
        scale_ptr, scale_signature = signer(type(x_scale))(x_scale, "x_scale")
    ids_ptr, ids_signature = signer(type(topk_ids))(topk_ids, "topk_ids")
    router_ptr, router_signature = signer(type(topk_weights))(topk_weights, "topk_weights")
    y_ptr, y_signature = 0, None
    if out is not None:
        y_ptr, y_signature = signer(type(out))(out, "out")
    counts_ptr, counts_signature = 0, None
    if expert_counts is not None:
        kind = type(expert_counts)
        counts_ptr, counts_signature = signer(kind)(expert_counts, "expert_counts")
    key = (
        x_signature,
        scale_signature,
        ids_signature,
        router_signature,
        y_signature,
        counts_signature,
    )
    fit = weights.calls.get(key)
    if fit is None or (x_ptr | y_ptr) % 16:
        given = x, x_scale, topk_ids, topk_weights, weights, out, expert_counts
        fit = weights.calls[key] = check_call(*given)
    elif fit.out is not None:
        _check_apart(x_ptr, fit.x.num_bytes, y_ptr, fit.out.num_bytes)
    return fit, x_ptr, scale_ptr, ids_ptr, router_ptr, y_ptr, counts_ptr


def check_call(
    x,
    x_scale,
    topk_ids,
    topk_weights,
    weights: ExpertWeights,
    out,
    expert_counts=None,
    read: Callable = view,
) -> Fit:
    """Read the arguments, each by `read`: `view`, or `host_view` for NumPy arrays. Raises what
    `mega_moe` documents where they do not fit.
    """
    _check_wrapped(weights)
    x = read(x, "x")
    scale = None if x_scale is None else read(x_scale, "x_scale")
    ids, router = read(topk_ids, "topk_ids"), read(topk_weights, "topk_weights")
    y = None if out is None else read(out, "out")
    read(weights.tensors[0], "w13")  # refuses host weights on a GPU, and the reverse
    sizes = _check(x, scale, ids, router, y, weights)
    if expert_counts is not None:
        counts = read(expert_counts, "expert_counts")
        remedy = "pass a counter for each expert of the weights"
        check_array(
            counts, "expert_counts", (weights.num_experts,), ("i32",), weights.device, remedy
        )
        check_contiguous(counts, "expert_counts")
    if y is not None:
        _check_apart(x.ptr, x.layout.num_bytes, y.ptr, y.layout.num_bytes)
    layouts = [array and array.layout for array in (x, scale, ids, router, y)]
    return Fit(*layouts, *sizes)


def read_expert_map(expert_map, device: int) -> tuple[int, tuple[int, int]]:
    """Address and shape of a map of logical experts; 0 and no rows for None."""
    if expert_map is None:
        return 0, (0, 0)
    got = view(expert_map, "expert_map")
    remedy = "pass a row of replicas for each logical expert"
    check_array(got, "expert_map", (None, None), ("i32",), device, remedy)
    if not all(got.shape):
        raise ValueError(f"expert_map must not be empty, got shape {list(got.shape)}; {remedy}")
    check_contiguous(got, "expert_map")
    return got.ptr, got.shape


def _check_wrapped(weights) -> None:
    if not isinstance(weights, ExpertWeights):
        raise TypeError(
            f"weights must be jitmoe.ExpertWeights, got {type(weights).__name__}; "
            "wrap the tensors in it"
        )


def _check_apart(x_ptr: int, x_bytes: int, y_ptr: int, y_bytes: int) -> None:
    x_end, y_end = x_ptr + x_bytes, y_ptr + y_bytes
    if x_ptr < y_end and y_ptr < x_end:
        raise ValueError(
            f"out, {y_ptr:#x} to {y_end:#x}, overlaps x, {x_ptr:#x} to {x_end:#x}, which is "
            "still read while rows are written; pass memory of its own"
        )


def _check(x, scale, ids, router, out, weights: ExpertWeights) -> tuple[int, int]:
    """num_tokens and top_k of arguments that fit each other and the weights."""
    hidden, device = weights.hidden, weights.device
    quantizes = format_of(weights.format).quantizes
    if not quantizes and (scale is not None or x.dtype in ("e4m3", "u8")):
        raise ValueError(
            f"x is e4m3 and the weights are {weights.format}; pass x in bf16, without scales"
        )
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
        check_array(scale, "x_scale", scale.shape, ("f32",), device, "")
        token_strides(scale.shape, scale.strides, num_tokens, hidden)
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
