"""Number formats of the kernels in plain array arithmetic, the same under NumPy and CuPy.

`xp` is the array module (`numpy` or `cupy`). CuPy has no 8-bit floats, so the canonical form of an
e4m3 array here is its codes in uint8 and that of a bf16 array its bits in uint16; arrays of the
ml_dtypes types are accepted as well.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jitmoe.plan.memory_map import ceil_div
from jitmoe.plan.problem import QUANT_GROUP

E4M3_MAX = 448.0
# Least amax a scale is made from: its reciprocal stays finite in float32, zeros quantise to zeros.
MIN_AMAX = 1e-10

_E4M3_NAN = 0x7F
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def view_e4m3(codes):
    """NumPy uint8 codes as ml_dtypes.float8_e4m3fn, without a copy."""
    return codes.view(ml_dtypes.float8_e4m3fn)


def view_bf16(bits):
    """NumPy uint16 bits as ml_dtypes.bfloat16, without a copy."""
    return bits.view(ml_dtypes.bfloat16)


def decode_e4m3(codes, xp=np):
    """e4m3 (any 1-byte dtype) to float32 of the same shape. Exact; 0x7F and 0xFF are NaN."""
    return xp.take(xp.asarray(_E4M3_VALUES), codes.view(xp.uint8))


def encode_e4m3(values, xp=np):
    """Float to e4m3 codes (uint8) of the same shape: to nearest even, saturating, NaN to 0x7F.

    This is `cvt.rn.satfinite.e4m3x2.f32`: what is beyond +-448, infinities included, becomes
    +-448, and zeros keep their sign. Values are rounded to float32 first.
    """
    values = values.astype(xp.float32)
    is_nan = xp.isnan(values)
    magnitude = xp.abs(xp.where(is_nan, xp.float32(0), values))
    magnitude = xp.minimum(magnitude, xp.float32(E4M3_MAX))
    _, exponent = xp.frexp(magnitude)  # magnitude = m * 2**exponent with 0.5 <= m < 1
    # Exponent of the leading bit; -6 is the smallest, shared by the subnormals and zero.
    exponent = xp.where(magnitude == 0, -6, xp.maximum(exponent - 1, -6)).astype(xp.int32)
    # Eighths of 2**exponent: 8 to 16 for normals, 0 to 8 for subnormals. In the code the mantissa
    # sits right below the exponent, so one rounded up to 16 carries into it by plain addition.
    eighths = xp.rint(xp.ldexp(magnitude, 3 - exponent)).astype(xp.int32)
    codes = (exponent + 6) * 8 + eighths + xp.where(xp.signbit(values), 0x80, 0)
    return xp.where(is_nan, _E4M3_NAN, codes).astype(xp.uint8)


def decode_bf16(bits, xp=np):
    """bf16 bits (uint16) to float32 of the same shape. Exact."""
    return (bits.astype(xp.uint32) << 16).view(xp.float32)


def encode_bf16(values, xp=np):
    """Float to bf16 bits (uint16) of the same shape, to nearest even, NaN to 0x7FC0.

    Values are rounded to float32 first; those too large become infinities.
    """
    values = xp.ascontiguousarray(values.astype(xp.float32))
    bits = values.view(xp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # A NaN whose payload is all ones would carry into the sign.
    return xp.where(xp.isnan(values), 0x7FC0, rounded).astype(xp.uint16)


def round_bf16(values, xp=np):
    """Float to the nearest bf16 value, as float32."""
    return decode_bf16(encode_bf16(values, xp), xp)


def to_float(array, dtype, xp=np):
    """Any float array, bf16 bits (uint16) included, as `dtype`."""
    if array.dtype == xp.uint16:
        array = decode_bf16(array, xp)
    return array.astype(dtype)


def decode_e8m0(codes, xp=np):
    """e8m0 (any 1-byte dtype), powers of two from 2**-127 on, to float32 of the same shape. Exact;
    0xFF is NaN.
    """
    codes = codes.view(xp.uint8).astype(xp.uint32)
    bits = xp.where(codes == 0, 1 << 22, xp.where(codes == 0xFF, 0x7FC00000, codes << 23))
    return bits.astype(xp.uint32).view(xp.float32)


def quantize_tokens(x, xp=np, scales="group"):
    """Quantise rows in groups of 128 channels; a last group may be narrower.

    x        [num_tokens, channels] float or bf16 bits, finite
    scales   "group", or "token" or "tensor": one group is as wide as a row, or all of x
    returns  codes uint8 [num_tokens, channels], scale f32 [num_tokens, ceil(channels / 128)],
             [num_tokens, 1] or [1]

    All in float32, with amax = max(|x|) over the group, but at least 1e-10:

        scale = amax * f32(1 / 448)
        code  = e4m3(x * (448 / amax))          to nearest even, saturating
    """
    num_tokens, channels = x.shape
    if scales == "tensor" and num_tokens:
        codes, scale = _quantize(x, num_tokens, channels, xp)
        return codes, scale.reshape(1)
    return _quantize(x, 1, QUANT_GROUP if scales == "group" else channels, xp)


def quantize_weights(w, xp=np, scales="block"):
    """Quantise matrices in blocks of 128 x 128 by the rule of `quantize_tokens`.

    w        [..., rows, cols] float or bf16 bits, finite
    scales   "block", or "channel" or "tensor": a block is a row, or a matrix
    returns  codes uint8 [..., rows, cols], scale f32 [..., ceil(rows / 128), ceil(cols / 128)],
             [..., rows, 1] or [..., 1, 1]

    The last blocks of a matrix may be smaller.
    """
    *_, rows, cols = w.shape
    blocks = {"block": (QUANT_GROUP, QUANT_GROUP), "channel": (1, cols), "tensor": (rows, cols)}
    return _quantize(w, *blocks[scales], xp)


def _quantize(x, block_rows, block_cols, xp):
    x = to_float(x, xp.float32, xp)
    *lead, rows, cols = x.shape
    row_blocks, col_blocks = ceil_div(rows, block_rows), ceil_div(cols, block_cols)
    if x.size == 0:  # a maximum over nothing is an error
        return xp.zeros(x.shape, xp.uint8), xp.zeros((*lead, row_blocks, col_blocks), xp.float32)
    padded = xp.zeros((*lead, row_blocks * block_rows, col_blocks * block_cols), xp.float32)
    padded[..., :rows, :cols] = x
    blocks = padded.reshape(*lead, row_blocks, block_rows, col_blocks, block_cols)
    amax = xp.maximum(xp.abs(blocks).max(axis=(-3, -1), keepdims=True), xp.float32(MIN_AMAX))
    codes = encode_e4m3(blocks * (xp.float32(E4M3_MAX) / amax), xp).reshape(padded.shape)
    scale = (amax * xp.float32(1 / E4M3_MAX)).reshape(*lead, row_blocks, col_blocks)
    return xp.ascontiguousarray(codes[..., :rows, :cols]), scale


def dequantize_tokens(codes, scale, xp=np):
    """e4m3 [num_tokens, channels] times scale [num_tokens, ceil(channels / 128)], [num_tokens],
    [num_tokens, 1], [1] or [], in float64.

    Raises ValueError if the shapes do not fit each other.
    """
    return _dequantize(codes, scale, 1, xp)


def dequantize_weights(codes, scale, xp=np, halves_alternate=False):
    """e4m3 [rows, cols] times scale [ceil(rows / 128), ceil(cols / 128)], [rows], [rows, 1], [],
    [1] or [1, 1], in float64; or [2] or [2, 1] of the two halves of rows, unless these are blocks;
    or, where halves alternate, of even and odd rows.

    Raises ValueError if the shapes do not fit each other.
    """
    rows, cols = codes.shape
    is_block = scale.shape == (ceil_div(rows, QUANT_GROUP), ceil_div(cols, QUANT_GROUP))
    if scale.shape in ((2,), (2, 1)) and rows % 2 == 0 and not is_block:
        spread = xp.tile if halves_alternate else xp.repeat
        scale = spread(scale.reshape(2), rows // 2)
    return _dequantize(codes, scale, QUANT_GROUP, xp)


def _dequantize(codes, scale, block_rows, xp):
    rows, cols = codes.shape
    expected = (ceil_div(rows, block_rows), ceil_div(cols, QUANT_GROUP))
    if scale.shape != expected and scale.shape in ((rows,), (rows, 1), (), (1,), (1, 1)):
        return decode_e4m3(codes, xp) * scale.astype(xp.float64).reshape(-1, 1)
    if scale.shape != expected:
        raise ValueError(
            f"the scale of {rows} x {cols} codes must have shape {expected}, got {scale.shape}; "
            f"a block is {block_rows} x {QUANT_GROUP}"
        )
    wide = xp.repeat(scale.astype(xp.float64), block_rows, axis=0)[:rows]
    wide = xp.repeat(wide, QUANT_GROUP, axis=1)[:, :cols]
    return decode_e4m3(codes, xp) * wide
