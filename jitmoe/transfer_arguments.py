"""What dispatch() and combine() are given: read, and refused in a sentence if it does not fit."""

from __future__ import annotations

from typing import NamedTuple

from jitmoe.arguments import split_x
from jitmoe.dispatched import DispatchHandle
from jitmoe.plan.scales import token_strides
from jitmoe.run import families
from jitmoe.run.arrays import DeviceArray, check_array, check_contiguous, check_rows, view
from jitmoe.run.symmetric import Group


class How(NamedTuple):
    """Arguments of `dispatch` that are the same on all ranks."""

    num_experts: int | None
    first_expert: int
    layout: str | None
    alignment: int | None
    format: str | None
    exact: bool
    max_num_tokens: int | None
    num_sms: int | None


class Tokens(NamedTuple):
    """One rank's arguments of `dispatch`, read."""

    x: DeviceArray
    scale: DeviceArray | None
    ids: DeviceArray | None
    weights: DeviceArray | None

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of x from token to token in bytes, then of scales in elements."""
        if self.scale is None:
            return 2 * self.x.strides[0], 0, 0
        scale = self.scale
        return self.x.strides[0], *token_strides(scale.shape, scale.strides, *self.x.shape)


def read_tokens(group: Group, x, topk_ids, topk_weights, is_cached: bool) -> Tokens:
    rows, scale = split_x(x)
    rows, scale = view(rows, "x"), None if scale is None else view(scale, "x_scale")
    if scale is None and rows.dtype in ("e4m3", "u8"):
        raise ValueError("x is e4m3 and has no scales; pass x=(x_fp8, x_scale)")
    formats = ("bf16", "u16") if scale is None else ("e4m3", "u8")
    check_array(
        rows, "x", (None, None), formats, group.device, "pass rows of hidden channels", "group"
    )
    check_rows(rows, "x", 8 if scale is None else 16)
    if scale is not None:
        check_array(scale, "x_scale", scale.shape, ("f32",), group.device, "", "group")
        token_strides(scale.shape, scale.strides, *rows.shape)
    if is_cached:
        if topk_ids is not None or topk_weights is not None:
            raise ValueError(
                "topk_ids and topk_weights are those of the handle's dispatch; leave them out, or "
                "the handle"
            )
        return Tokens(rows, scale, None, None)
    if topk_ids is None or topk_weights is None:
        raise ValueError("topk_ids and topk_weights must be given unless a handle is")
    ids, weights = view(topk_ids, "topk_ids"), view(topk_weights, "topk_weights")
    remedy = "pass a row of expert numbers for each row of x"
    check_array(
        ids, "topk_ids", (rows.shape[0], None), ("i32", "i64"), group.device, remedy, "group"
    )
    remedy, formats = "pass one weight for each of topk_ids", ("f32", "bf16", "u16")
    check_array(weights, "topk_weights", ids.shape, formats, group.device, remedy, "group")
    check_contiguous(ids, "topk_ids")
    check_contiguous(weights, "topk_weights")
    return Tokens(rows, scale, ids, weights)


def read_rows(group: Group, handle: DispatchHandle, y, bias, out):
    """Rows, biases and out as DeviceArrays, and out itself."""
    rows, plan = view(y, "y"), handle.plan
    remedy = "pass a row for each of Dispatched.x"
    check_array(rows, "y", (None, plan.hidden), ("bf16", "u16"), group.device, remedy, "group")
    check_rows(rows, "y", 8)
    if rows.shape[0] < handle.room[1]:
        raise ValueError(
            f"y must have the {handle.room[1]:,} rows of Dispatched.x, got {rows.shape[0]:,}"
        )
    biases = []
    for one in () if bias is None else bias if isinstance(bias, tuple) else (bias,):
        biases.append(view(one, "bias"))
        shape, remedy = (handle.num_tokens, plan.hidden), "pass a row for each token"
        check_array(biases[-1], "bias", shape, ("bf16", "u16"), group.device, remedy, "group")
        check_rows(biases[-1], "bias", 8)
    if len(biases) > 2:
        raise ValueError(f"bias must be one array or two, got {len(biases)}; add them up")
    if out is None:
        out = families.empty_rows(handle.num_tokens, plan.hidden, y, rows.family, group.device)
    target = view(out, "out")
    shape, remedy = (handle.num_tokens, plan.hidden), "pass a row for each token"
    check_array(target, "out", shape, ("bf16", "u16"), group.device, remedy, "group")
    check_rows(target, "out", 8)
    return rows, biases, target, out
