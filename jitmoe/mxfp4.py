"""MXFP4 in plain array arithmetic, the same under NumPy and CuPy: e2m1 codes with a scale in e8m0
for 32 along a row (OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from jitmoe.fp8 import decode_e8m0, to_float
from jitmoe.plan.memory_map import align, ceil_div
from jitmoe.plan.problem import MX_GROUP

E2M1_MAX = 6.0
# By code; codes from 8 on are the negative ones.
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# Between neighbours; a number that is exactly there goes to the even code.
_MIDDLES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_MAX_EXPONENT = 2  # of 6.0
_TILE_ROWS, _K_GROUPS = 256, 4  # of a kernel's tile; groups of 32 in a k-block
# Packed scales of a row are filled up to a multiple of so many groups: W4A8 in decode takes the
# k-blocks two by two.
PACKED_GROUPS = {"mxfp4_fp8": 2 * _K_GROUPS, "mxfp4_bf16": _K_GROUPS}
# W4A16 expands weights to numbers 2^-126 as large (templates/roles/accumulate_mxfp4_bf16.cuh):
# packed scales are larger by this, and the largest then is no NaN.
SCALE_OFFSET = 66
_LARGEST_SCALES = {"mxfp4_fp8": 254, "mxfp4_bf16": 254 - SCALE_OFFSET}
# W4A8 has a scale for each row, and four bits for how far below it that of 32 weights is: these,
# 2^6 as large, are e4m3 numbers (templates/roles/expand_e4m3.cuh).
ROW_UNIT, TOP_EXPONENT = 2.0**-6, 12
FORMATS = tuple(_LARGEST_SCALES)  # of plan.formats.FORMATS


def quantize_mxfp4(w, xp=np):
    """Quantise rows in groups of 32, whose scale is a power of two.

    w        [..., cols] float or bf16 bits, finite; cols a multiple of 32
    returns  codes uint8 [..., cols / 2], two each, the first in the low half, and scales uint8
             (e8m0) [..., cols / 32]

        scale = 2^(floor(log2(amax)) - 2)       of the group's largest magnitude
        code  = e2m1(w / scale)                 to nearest even, saturating at 6
    """
    w = to_float(w, xp.float32, xp)
    *lead, cols = w.shape
    groups = w.reshape(*lead, cols // MX_GROUP, MX_GROUP)
    _, exponent = xp.frexp(xp.abs(groups).max(axis=-1))  # amax = m * 2**exponent, 0.5 <= m < 1
    scales = xp.clip(exponent - 1 - _MAX_EXPONENT + 127, 0, 254).astype(xp.uint8)
    scaled = groups / decode_e8m0(scales, xp)[..., None]
    codes = _encode_e2m1(scaled, xp).reshape(*lead, cols)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def _encode_e2m1(values, xp):
    magnitude = xp.abs(values)
    codes = xp.zeros(values.shape, xp.uint8)
    for code, middle in enumerate(_MIDDLES.tolist()):  # code to code + 1, which is odd or even
        codes += magnitude >= middle if code % 2 else magnitude > middle
    return codes | xp.where(xp.signbit(values), 8, 0).astype(xp.uint8)


def dequantize_mxfp4(codes, scales, xp=np):
    """Codes [..., cols / 2] times scales [..., cols / 32] in e8m0, float64 [..., cols]. Exact.

    Raises ValueError if the shapes do not fit each other.
    """
    *lead, half = codes.shape
    if scales.shape != (*lead, 2 * half // MX_GROUP):
        raise ValueError(
            f"scales of {list(codes.shape)} packed codes must have shape "
            f"{[*lead, 2 * half // MX_GROUP]}, got {list(scales.shape)}"
        )
    pairs = xp.stack([codes & 15, codes >> 4], axis=-1).reshape(*lead, 2 * half)
    values = xp.take(xp.asarray(_VALUES, xp.float64), pairs)
    return values * xp.repeat(decode_e8m0(scales, xp).astype(xp.float64), MX_GROUP, axis=-1)


def pack_scales(scales, format: str, gate_up: str | None, xp=np):
    """Scales as kernels take them: a copy in which those of a tile and k-block lie together.

    scales   [num_experts, rows, cols / 32] uint8 (e8m0)
    format   of FORMATS
    gate_up  of w13 the order of its rows (variant.GATE_UP), None for w2 and without a gate
    returns  uint32 of `packed_shape`: for each tile of 256 weight rows (`tile_rows`), a k-block
             being 128 channels

        mxfp4_bf16  of each k-block, a word for each row: its four scales
        mxfp4_fp8   f32 of each row, 2^-6 times its largest scale; then of each k-block, 16 bits for
                    each row: of its four scales the exponent, 12 for the row's largest, 0 for
                    2^-12 of that and less

    A row past the end has zeros, and in mxfp4_fp8 a k-block that makes their number even. Raises
    ValueError for a scale that the kernel cannot multiply by, NaN among them.
    """
    num_experts, rows, groups = scales.shape
    check_largest(int(scales.max()), format)
    padded = xp.zeros((num_experts, rows, align(groups, PACKED_GROUPS[format])), xp.uint8)
    if format == "mxfp4_bf16":
        padded[..., :groups] = scales + xp.uint8(SCALE_OFFSET)
        return _in_tiles(padded.view(xp.uint32), format, gate_up, xp)
    largest = scales.max(axis=-1, keepdims=True)
    padded[..., :groups] = TOP_EXPONENT - xp.minimum(largest - scales, TOP_EXPONENT)
    exponents = (padded[..., ::2] | padded[..., 1::2] << 4).view(xp.uint16)
    of_blocks = _in_tiles(exponents, format, gate_up, xp).view(xp.uint32)
    of_rows = decode_e8m0(largest, xp) * xp.float32(ROW_UNIT)
    of_rows = _in_tiles(of_rows.view(xp.uint32), None, gate_up, xp)
    num_tiles = of_blocks.shape[1]
    parts = [part.reshape(num_experts, num_tiles, -1) for part in (of_rows, of_blocks)]
    return xp.concatenate(parts, axis=-1)


def _in_tiles(values, format: str | None, gate_up: str | None, xp):
    """[num_experts, rows, k_blocks] as [num_experts, tiles, k_blocks, 256], zeros past the end."""
    at = xp.asarray(tile_rows(values.shape[1], format, gate_up))
    taken = xp.take(values, xp.maximum(at, 0), axis=1)
    taken[:, at < 0] = 0
    return xp.ascontiguousarray(taken.swapaxes(2, 3))


def check_largest(code: int, format: str) -> None:
    """Raises ValueError for the largest of scales, in e8m0, that the kernel cannot multiply by."""
    allowed = _LARGEST_SCALES[format]
    if code > allowed:
        raise ValueError(
            f"scales of {format} must be up to 2^{allowed - 127}, got e8m0 code {code}; 255 is "
            "NaN: look for what wrote it"
        )


def packed_shape(num_experts: int, rows: int, cols: int, format: str, gate_up: str | None) -> tuple:
    """Of what `pack_scales` makes of the scales of [num_experts, rows, cols] weights."""
    halves = 1 if gate_up is None else 2
    tiles = ceil_div(rows // halves, _TILE_ROWS // halves)
    k_blocks = align(ceil_div(cols, MX_GROUP), PACKED_GROUPS[format]) // _K_GROUPS
    if format == "mxfp4_bf16":
        return num_experts, tiles, k_blocks, _TILE_ROWS
    return num_experts, tiles, _TILE_ROWS + k_blocks * _TILE_ROWS // 2


@lru_cache(16)
def tile_rows(rows: int, format: str | None, gate_up: str | None):
    """Which of an expert's rows the numbers of a k-block are of: int64 [tiles, 256], -1 for none.

    In the order that threads read them in: math's for mxfp4_bf16
    (templates/roles/accumulate_mxfp4_bf16.cuh, chunk_scales), expand's for mxfp4_fp8
    (expand_e4m3.cuh, load_scales); None for rows as they lie in the tile, which is gate and up in
    groups of 8 by turns, or as in the matrix.
    """
    at = np.arange(rows)
    if gate_up is not None:
        halves = at.reshape(-1, 2).T if gate_up == "interleaved" else at.reshape(2, -1)
        at = halves.reshape(2, -1, 8).swapaxes(0, 1).reshape(-1)
    tiles = np.full(align(rows, _TILE_ROWS), -1)
    tiles[:rows] = at
    if format == "mxfp4_bf16":  # rows 16w + i and + 8 of blocks of 64, of which a warpgroup has two
        by_axis = tiles.reshape(-1, 2, 2, 4, 2, 8).transpose(0, 1, 3, 5, 2, 4)
    elif format == "mxfp4_fp8":  # rows i, i + 8, ... of a warp's 64
        by_axis = tiles.reshape(-1, 4, 8, 8).transpose(0, 1, 3, 2)
    else:
        by_axis = tiles
    return by_axis.reshape(-1, _TILE_ROWS)
