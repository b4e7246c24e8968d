"""Weights and tokens brought into any format of the kernels, under NumPy and CuPy (as `xp`).

Plain array arithmetic, for tests, demos and makers of checkpoints; the kernel quantises tokens by
itself.
"""

from __future__ import annotations

import numpy as np

from jitmoe.fp8 import encode_bf16, quantize_tokens, quantize_weights
from jitmoe.mxfp4 import pack_scales, quantize_mxfp4
from jitmoe.plan.formats import format_of

__all__ = ["pack_scales", "tokens", "weights"]


def weights(w, format: str, xp=np):
    """Matrices as `ExpertWeights` takes them: (codes, scale).

    w        [..., rows, cols] float or bf16 bits, finite; for MXFP4 cols a multiple of 32
    format   of plan.formats.FORMATS
    returns  fp8_*    uint8 (e4m3) [..., rows, cols] and f32 [..., ceil(rows / 128), ceil(cols /
                      128)], of channels [..., rows, 1], of tensors [..., 1, 1]
             mxfp4_*  uint8 [..., rows, cols / 2], two e2m1 codes each, the first in the low half,
                      and uint8 (e8m0) [..., rows, cols / 32]
             bf16     uint16 (bits) [..., rows, cols] and None

    The rules of rounding are those of `fp8.quantize_weights` and `mxfp4.quantize_mxfp4`. Raises
    ValueError for an unknown format.
    """
    form = format_of(format)
    if form.scales is None:
        return encode_bf16(w, xp), None
    return quantize_mxfp4(w, xp) if form.is_mx else quantize_weights(w, xp, form.scales)


def tokens(x, format: str, xp=np):
    """Tokens as the tensor cores take them beside weights of a format: (x, x_scale).

    x        [num_tokens, hidden] float or bf16 bits, finite
    format   of plan.formats.FORMATS
    returns  uint8 (e4m3) [num_tokens, hidden] and f32 [num_tokens, ceil(hidden / 128)] by the rule
             of `fp8.quantize_tokens`, which is the kernel's; for bf16 and mxfp4_bf16 uint16 (bits)
             and None

    Raises ValueError for an unknown format.
    """
    if format_of(format).quantizes:
        return quantize_tokens(x, xp)
    return encode_bf16(x, xp), None
