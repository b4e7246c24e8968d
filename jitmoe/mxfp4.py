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
# Words of the scales of a k-block's four groups, in the order of math's threads: see pack_scales.
_TILE_ROWS, _K_GROUPS = 256, 4
# What packed codes are larger by: kernels expand weights to numbers that are 2^-6 and 2^-126 as
# large (templates/roles/accumulate_mxfp4_*.cuh).
_SCALE_OFFSETS = {"mxfp4_fp8": 6, "mxfp4_bf16": 66}
# Largest codes: a k-block's sums of codes of tokens and weights, up to 128 * 448 * 6, times a scale
# are floats; packed codes are no NaN.
_LARGEST_SCALES = {"mxfp4_fp8": 127 + 109, "mxfp4_bf16": 254 - 66}
FORMATS = tuple(_SCALE_OFFSETS)  # of plan.formats.FORMATS


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
    format   of formats.FORMATS
    gate_up  of w13 the order of its rows (variant.GATE_UP), None for w2 and without a gate
    returns  uint32 [num_experts, tiles, ceil(cols / 128), 256]: a word has a row's scales of the
             k-block, and the words of a tile's rows are in the order of
             templates/roles/mxfp4.cuh, chunk_scales

    Raises ValueError for a scale that the kernel cannot multiply by, NaN among them.
    """
    num_experts, rows, groups = scales.shape
    check_largest(int(scales.max()), format)
    k_blocks = ceil_div(groups, _K_GROUPS)
    words = xp.zeros((num_experts, rows, k_blocks * _K_GROUPS), xp.uint8)
    words[..., :groups] = scales + xp.uint8(scale_offset(format))
    return _arrange(words.view(xp.uint32), gate_up, xp)


def scale_offset(format: str) -> int:
    """What packed scales of a format are larger by."""
    return _SCALE_OFFSETS[format]


def check_largest(code: int, format: str) -> None:
    """Raises ValueError for the largest of scales, in e8m0, that the kernel cannot multiply by."""
    allowed = _LARGEST_SCALES[format]
    if code > allowed:
        raise ValueError(
            f"scales of {format} must be up to 2^{allowed - 127}, got e8m0 code {code}; 255 is "
            "NaN: look for what wrote it"
        )


def packed_shape(num_experts: int, rows: int, cols: int, gate_up: str | None) -> tuple:
    """Of what `pack_scales` makes of the scales of [num_experts, rows, cols] weights."""
    halves = 1 if gate_up is None else 2
    tiles = ceil_div(rows // halves, _TILE_ROWS // halves)
    return num_experts, tiles, ceil_div(cols, _K_GROUPS * MX_GROUP), _TILE_ROWS


@lru_cache(16)
def word_order(rows: int, groups: int, gate_up: str | None):
    """Where `pack_scales` takes an expert's words from: int64 [tiles, ceil(groups / 4), 256] of
    row * ceil(groups / 4) + k-block, -1 where there is none.
    """
    k_blocks = ceil_div(groups, _K_GROUPS)
    words = np.arange(1, rows * k_blocks + 1, dtype=np.uint32).reshape(1, rows, k_blocks)
    return _arrange(words, gate_up, np)[0].astype(np.int64) - 1


def _arrange(words, gate_up: str | None, xp):
    """Words [num_experts, rows, k_blocks] in the order of `pack_scales`, zeros between."""
    num_experts, rows, k_blocks = words.shape
    if gate_up is None:  # rows 16w + i and + 8 of blocks of 64, of which a warpgroup has two
        words = words[:, :, None]
        axes, halves = ("e", "t", "g", "m", "w", "h", "i", "k"), 1
    else:  # of 8 channels the gate rows, then the up rows
        if gate_up == "interleaved":
            words = words.reshape(num_experts, rows // 2, 2, k_blocks)
        else:
            words = words.reshape(num_experts, 2, rows // 2, k_blocks).swapaxes(1, 2)
        axes, halves = ("e", "t", "g", "m", "w", "i", "h", "k"), 2
    tile_rows = _TILE_ROWS // halves
    padded = xp.zeros((num_experts, align(words.shape[1], tile_rows), halves, k_blocks), xp.uint32)
    padded[:, : words.shape[1]] = words
    sizes = {"e": num_experts, "g": 2, "m": 2, "w": 4, "h": 2, "i": 8, "k": k_blocks}
    sizes["t"] = padded.shape[1] // tile_rows
    by_axis = padded.reshape([sizes[axis] for axis in axes])
    order = [axes.index(axis) for axis in ("e", "t", "k", "g", "w", "i", "m", "h")]
    packed = by_axis.transpose(order).reshape(num_experts, sizes["t"], k_blocks, _TILE_ROWS)
    return xp.ascontiguousarray(packed)
