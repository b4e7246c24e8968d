"""Weights of one expert as the oracle multiplies them."""

from __future__ import annotations

from jitmoe.fp8 import dequantize_weights, to_float
from jitmoe.mxfp4 import dequantize_mxfp4
from jitmoe.plan.formats import Format


def expert_weights(w, scale, expert: int, form: Format, xp, halves_alternate: bool = False):
    """w[expert] in float64. Where halves alternate, a scale of each is of even and odd rows."""
    if form.scales is None:
        return to_float(w[expert], xp.float64, xp)
    if form.is_mx:
        return dequantize_mxfp4(w[expert], scale[expert], xp)
    return dequantize_weights(w[expert], scale[expert], xp, halves_alternate)
