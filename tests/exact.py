"""Layers and tokens for which nothing is rounded before the sum over the slots, in FP8 with block
scales and in MXFP4: y is known to the bit.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from jitmoe import reference
from jitmoe.fp8 import dequantize_weights, encode_bf16, encode_e4m3, quantize_tokens
from jitmoe.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from jitmoe.plan.formats import format_of

# Ragged ends of both GEMMs' tiles, and scale blocks that hold gate and up.
HIDDEN, NUM_EXPERTS, TOP_K = 384, 4, 2

# What exact_inputs() and exact_layer() agree on: channel 0 of x is 1, channel 1 of every group of
# 128 is 14, others are up to +-7.
ONE, LARGEST = 0, 1
GROUP_EXPONENTS = np.array([0, 3, -2])  # of w13's scales along hidden; x has the opposite ones


def intermediate_of(format: str) -> int:
    """A multiple of 16, or of 32."""
    return 224 if format_of(format).is_mx else 208


class Inputs(NamedTuple):
    """NumPy arrays; x has bf16 values whose quantisation is `codes` and `scale`."""

    x: np.ndarray
    codes: np.ndarray
    scale: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray

    def argument(self, x_is_fp8: bool):
        return (self.codes, self.scale) if x_is_fp8 else encode_bf16(self.x)

    def formula(self, layer: reference.Layer, format: str) -> np.ndarray:
        """What the formula gives, float64."""
        x = self[1:3] if format_of(format).quantizes else (self.x, None)
        return reference.mega_moe(*x, *self[3:], *layer, requantize=False, format=format)


def exact_inputs(num_tokens: int) -> Inputs:
    """Small integers times powers of two; 14 is 448 / 32, so that scales are powers of two too."""
    rng = np.random.default_rng(num_tokens)
    x = rng.integers(-7, 8, (num_tokens, HIDDEN)).astype(np.float32)
    x[:, ONE], x[:, LARGEST::128] = 1, 14
    token_exponents = rng.integers(0, 2, (num_tokens, 1))
    x = np.ldexp(x, token_exponents - np.repeat(GROUP_EXPONENTS, 128))
    ids = np.argsort(rng.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    weights = np.exp2(rng.integers(-2, 2, (num_tokens, TOP_K))).astype(np.float32)
    return Inputs(x, *quantize_tokens(x), ids, weights)


@cache
def exact_layer(format: str) -> reference.Layer:
    """Weights for which nothing is rounded before the sum over the slots.

    Gates are 64 or more: exp2 is lost beside 1 and silu(gate) = gate, but for an ulp of an inexact
    reciprocal of 1. Ups are integers up to 14, so a group's largest product is 14 * 2^n, its scale
    2^n / 32, and codes are multiples of 8. Sums have two products at most and 7 bits: the tensor
    cores drop none, a slot's row is a bf16 number, and the ulp is rounded away.
    """
    rng, intermediate = np.random.default_rng(0), intermediate_of(format)
    channels = np.arange(intermediate)
    plain = np.flatnonzero(np.arange(HIDDEN) % 128 > LARGEST)
    w13 = np.zeros((NUM_EXPERTS, 2 * intermediate, HIDDEN), np.float32)
    w2 = np.zeros((NUM_EXPERTS, HIDDEN, intermediate), np.float32)
    for expert in range(NUM_EXPERTS):
        gate, up = w13[expert, :intermediate], w13[expert, intermediate:]
        # Every 16 channels, so in all that share two scales, one has the largest gate and up.
        is_largest = channels % 16 == 0
        gate[:, ONE] = np.where(is_largest, 128, rng.choice([64, 128], intermediate))
        for channel in channels:
            if is_largest[channel]:
                up[channel, LARGEST + 128 * rng.integers(HIDDEN // 128)] = 1
            else:
                up[channel, rng.choice(plain, 2, replace=False)] = rng.choice([-1, 1], 2)
        for row in w2[expert]:
            group = channels[channels // 128 == rng.integers(2)]
            row[rng.choice(group, 2, replace=False)] = rng.choice([-1, 1], 2)
    row_blocks = -(-2 * intermediate // 128)
    w13_exponents = rng.integers(0, 2, (NUM_EXPERTS, row_blocks, 1)) + GROUP_EXPONENTS
    w2_exponents = rng.integers(-3, 4, (NUM_EXPERTS, HIDDEN // 128, 2))
    matrices = []
    for w, exponents in ((w13, w13_exponents), (w2, w2_exponents)):
        codes, scales = encode_e4m3(w), np.exp2(exponents).astype(np.float32)
        if format_of(format).is_mx:  # the same values
            pairs = zip(codes, scales, strict=True)
            codes, scales = quantize_mxfp4(np.stack([dequantize_weights(*pair) for pair in pairs]))
        matrices += [codes, scales]
    return reference.Layer(*matrices)


# 32 weights count for certain whose scale is more than 2^-12 of their row's largest, in mxfp4_fp8.
LEAST_EXPONENT = 12
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of codes 0 .. 7; 8 more are negative
_ONE = 127  # e8m0 of 1


class EveryCode(NamedTuple):
    """A layer in MXFP4 of one expert, a call (x in bf16, ids, weights) and what y is, float64."""

    layer: reference.Layer
    call: tuple[np.ndarray, ...]
    y: np.ndarray


def every_code(num_tokens: int) -> EveryCode:
    """Each row of w13 and w2 has one code that is not zero, whose scale is the row's largest or
    smaller, as long as it counts; in w2 that is every code with every such distance. Scales of
    zeros are of any size.

    x is 1, and 14 in channel 1 of a group of 128: scales of tokens are 2^-5. Gates are 64, whose
    silu they are; ups are whole numbers up to 14, of which every group has one.
    """
    hidden, half, rng = 512, 256, np.random.default_rng(0)

    def put(codes, channels, code):
        """One code in each row of packed ones that are zero."""
        codes[np.arange(len(codes)), channels // 2] = code << channels % 2 * 4

    def scales_of(groups, counts, exponents):
        """Those of the chunks that count are 2^exponent; some other chunk has the row's largest,
        or the same one for no distance.
        """
        rows = np.arange(len(counts))
        largest = _ONE + exponents + rows % LEAST_EXPONENT
        scales = largest[:, None] - rng.integers(0, 30, (len(rows), groups))
        scales[rows, (counts + 1 + rows // LEAST_EXPONENT % (groups - 1)) % groups] = largest
        scales[rows, counts] = _ONE + exponents
        return scales.astype(np.uint8)

    def numbers_of(codes):
        return _E2M1[codes % 8] * np.where(codes < 8, 1, -1)

    channels, rows = np.arange(half), np.arange(hidden)
    w13 = np.zeros((2 * half, hidden // 2), np.uint8)
    w2 = np.zeros((hidden, half // 2), np.uint8)
    up_codes = np.array([2, 4, 5, 6, 10, 12, 13, 14])[channels % 8]  # 1 to 4, and negative
    ups, places = numbers_of(up_codes), channels * 84 % hidden
    is_largest = channels % 64 == 5
    up_codes[is_largest], ups[is_largest], places[is_largest] = 2, 14, 129
    places = np.concatenate([np.zeros(half, int), places])
    put(w13, places, np.concatenate([np.full(half, 6), up_codes]))  # gates: 4, times 16
    w13_scale = scales_of(hidden // 32, places // 32, np.repeat([4, 0], half))

    codes = np.r_[1:8, 9:16][rows // LEAST_EXPONENT % 14]
    picked, exponents = rows * 37 % half, rows % 11 - 5
    put(w2, picked, codes)
    w2_scale = scales_of(half // 32, picked // 32, exponents)
    pairs = set(zip(codes, rows % LEAST_EXPONENT, strict=True))
    assert len(pairs) == 14 * LEAST_EXPONENT

    x = np.ones((num_tokens, hidden), np.float32)
    x[:, LARGEST::128] = 14
    assert np.array_equal(dequantize_mxfp4(w13, w13_scale) @ x[0], [*[64.0] * half, *ups])
    layer = reference.Layer(w13[None], w13_scale[None], w2[None], w2_scale[None])
    router = np.zeros((num_tokens, 1), np.int32), np.ones((num_tokens, 1), np.float32)
    y = 64 * ups[picked] * numbers_of(codes) * 2.0**exponents
    return EveryCode(layer, (encode_bf16(x), *router), np.tile(y, (num_tokens, 1)))
