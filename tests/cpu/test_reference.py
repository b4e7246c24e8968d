"""The oracle against an independent loop over tokens and slots, and against cases done by hand."""

import math

import ml_dtypes
import numpy as np
import pytest

from jitmoe import fp8, reference
from jitmoe.fp8 import quantize_tokens, quantize_weights
from jitmoe.reference import mega_moe, random_layer, random_tokens, relative_error, worst_element
from jitmoe.reference_activations import silu

E4M3 = ml_dtypes.float8_e4m3fn
F32 = np.float32
ONE = 0x38  # the e4m3 code of 1.0


# The loop. It shares no code with jitmoe: ml_dtypes rounds, indices pick the scale of each element.


def naive_dequantize(codes, scale, block_rows):
    rows, cols = np.indices(codes.shape)
    return codes.view(E4M3).astype(np.float64) * scale[rows // block_rows, cols // 128]


def bf16(values):
    with np.errstate(invalid="ignore"):  # some NaN bits signal
        return values.astype(ml_dtypes.bfloat16).astype(F32)


def naive_requantize(row):
    row, values = row.astype(F32), np.zeros(len(row))
    for start in range(0, len(row), 128):
        group = row[start : start + 128]
        amax = max(F32(max(abs(v) for v in group)), F32(1e-10))
        codes = np.clip(group * (F32(448) / amax), -448, 448).astype(E4M3)
        values[start : start + 128] = codes.astype(np.float64) * float(amax * F32(1 / 448))
    return values


def naive_mega_moe(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale, requantize):
    intermediate = w2.shape[2]
    y = np.zeros((len(x), w2.shape[1]))
    x = naive_dequantize(x, x_scale, 1)
    for t in range(len(x)):
        total = np.zeros(w2.shape[1], F32 if requantize else np.float64)
        for e, weight in zip(ids[t], weights[t], strict=True):
            if not 0 <= e < len(w2):
                continue
            both = naive_dequantize(w13[e], w13_scale[e], 128) @ x[t]
            gate, up = both[:intermediate], both[intermediate:]
            mid = np.array([g / (1 + math.exp(-g)) for g in gate]) * up
            if requantize:
                mid = naive_requantize(mid)
            row = float(weight) * (naive_dequantize(w2[e], w2_scale[e], 128) @ mid)
            total += bf16(row.astype(F32)) if requantize else row
        y[t] = total
    return y


def compare_with_loop(tokens, layer):
    x, x_scale = quantize_tokens(tokens.x)
    args = (x, x_scale, tokens.topk_ids, tokens.topk_weights, *layer)
    for requantize in (False, True):
        y = mega_moe(*args, requantize=requantize)
        ref = naive_mega_moe(*args, requantize)
        assert y.dtype == np.float64 and y.shape == tokens.x.shape
        assert ref.any()
        assert relative_error(y, ref) < 1e-12


@pytest.mark.parametrize("routing", reference.ROUTINGS)
@pytest.mark.parametrize("intermediate", [128, 192, 208, 320])
def test_loop(intermediate, routing):
    layer = random_layer(4, 256, intermediate, seed=intermediate)
    compare_with_loop(random_tokens(9, 256, 4, 3, seed=1, routing=routing, outliers=5), layer)


def test_loop_top_k_1_and_outliers():
    layer = random_layer(4, 256, 64, seed=7, outliers=3)
    compare_with_loop(random_tokens(6, 256, 4, 1, seed=2), layer)


def test_one_expert_takes_all_and_others_are_empty():
    layer = random_layer(4, 128, 128, seed=3)
    tokens = random_tokens(20, 128, 4, 2, seed=3, routing="one_expert")
    assert set(tokens.topk_ids[:, 0].tolist()) == {2} and set(tokens.topk_ids[:, 1].tolist()) == {
        -1
    }
    compare_with_loop(tokens, layer)
    # The weights of experts that nobody names are not looked at.
    poisoned = [part.copy() for part in layer]
    for part in poisoned:
        part[[0, 1, 3]] = 0xFF if part.dtype == np.uint8 else np.nan
    x, ids, weights = tokens
    for requantize in (False, True):
        y = mega_moe(x, None, ids, weights, *layer, requantize=requantize)
        again = mega_moe(x, None, ids, weights, *poisoned, requantize=requantize)
        assert np.array_equal(y, again)


@pytest.mark.parametrize("requantize", [False, True])
def test_unused_slots_are_skipped_whatever_their_weight(requantize):
    layer = random_layer(3, 128, 128, seed=4)
    x = random_tokens(3, 128, 3, 3, seed=4).x
    ids = np.array([[1, -1, 3], [-(2**31), 2**31 - 1, 3], [2, 0, 1]], np.int32)
    weights = np.array([[0.5, np.nan, np.inf], [np.nan, 1, 1], [0.2, 0.3, 0.5]], F32)
    y = mega_moe(x, None, ids, weights, *layer, requantize=requantize)
    assert not y[1].any()
    first = mega_moe(x[:1], None, ids[:1, :1], weights[:1, :1], *layer, requantize=requantize)
    assert relative_error(y[:1], first) < 1e-12 and first.any()
    assert np.array_equal(
        y, mega_moe(x, None, ids.astype(np.int64), weights, *layer, requantize=requantize)
    )


def test_duplicate_experts_count_twice():
    layer = random_layer(2, 128, 128, seed=5)
    x = random_tokens(4, 128, 2, 1, seed=5).x
    twice = np.full((4, 2), 1, np.int32), np.tile(F32([0.25, 0.5]), (4, 1))
    once = np.full((4, 1), 1, np.int32), np.full((4, 1), 0.75, F32)
    y = mega_moe(x, None, *twice, *layer, requantize=False)
    assert relative_error(y, mega_moe(x, None, *once, *layer, requantize=False)) < 1e-12


@pytest.mark.parametrize("requantize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_zero_tokens(requantize, top_k):
    layer = random_layer(2, 128, 128, seed=6)
    tokens = random_tokens(0, 128, 2, top_k, seed=6)
    x, x_scale = quantize_tokens(tokens.x)
    assert x.shape == (0, 128) and x_scale.shape == (0, 1)
    y = mega_moe(x, x_scale, *tokens[1:], *layer, requantize=requantize)
    assert y.shape == (0, 128) and y.dtype == np.float64


def naive_bf16(x, ids, weights, w13, w2, requantize):
    y = np.zeros((len(x), w2.shape[1]))
    x, w13, w2 = (
        fp8.decode_bf16(fp8.encode_bf16(part)) if part.dtype != np.uint16 else fp8.decode_bf16(part)
        for part in (x, w13, w2)
    )
    for t in range(len(x)):
        for e, weight in zip(ids[t], weights[t], strict=True):
            if not 0 <= e < len(w2):
                continue
            gate, up = np.split(w13[e].astype(float) @ x[t].astype(float), 2)
            mid = float(weight) * np.array([g / (1 + math.exp(-g)) for g in gate]) * up
            mid = bf16(mid.astype(F32)).astype(float) if requantize else mid
            row = w2[e].astype(float) @ mid
            y[t] = (y[t].astype(F32) + bf16(row.astype(F32))) if requantize else y[t] + row
    return y


@pytest.mark.parametrize("routing", ["uniform", "unused", "duplicates"])
@pytest.mark.parametrize("requantize", [False, True])
def test_bf16_loop(routing, requantize):
    layer = random_layer(4, 144, 80, seed=3, format="bf16")
    assert layer.w13.dtype == np.uint16 and layer.w13_scale is layer.w2_scale is None
    x, ids, weights = random_tokens(9, 144, 4, 3, seed=1, routing=routing)
    ref = naive_bf16(x, ids, weights, layer.w13, layer.w2, requantize)
    for tokens in (x, fp8.encode_bf16(x)):
        y = mega_moe(tokens, None, ids, weights, *layer, requantize=requantize)
        assert ref.any() and relative_error(y, ref) < 1e-12


def test_bf16_factors_are_rounded_with_mid():
    """Once, with the router weight and the factor; not at all in the exact formula."""
    layer = random_layer(2, 32, 16, seed=3, format="bf16")
    x, ids, weights = random_tokens(4, 32, 2, 1, seed=1)
    args = x, None, ids, weights, *layer
    both = [
        mega_moe(*args, requantize=r, routed_scaling_factor=factor)
        for factor in (3.0, 1.0)
        for r in (False, True)
    ]
    assert relative_error(both[0], 3 * both[2]) < 1e-12
    assert 1e-4 < relative_error(both[1], 3 * both[3]) < 1e-2
    scaled = mega_moe(x, None, ids, 3 * weights, *layer, requantize=True)
    assert relative_error(scaled, both[1]) < 1e-3


# By hand.


def one_hot_token(hidden):
    """A token whose first channel is 1, as codes and scale."""
    x = np.zeros((1, hidden), np.uint8)
    x[0, 0] = ONE
    return x, np.ones((1, hidden // 128), F32)


def identity_w2(hidden, intermediate):
    """Channel i of the intermediate becomes channel i of the output."""
    w2 = np.zeros((1, hidden, intermediate), np.uint8)
    w2[0, range(intermediate), range(intermediate)] = ONE
    return w2, np.ones((1, hidden // 128, -(-intermediate // 128)), F32)


ALL_TO_EXPERT_0 = np.zeros((1, 1), np.int32), np.ones((1, 1), F32)


def test_gate_and_up_by_hand():
    # Gate 2 and up -1: silu(2) * -1 = -2 / (1 + e**-2). The halves exchanged: silu(-1) * 2.
    w13 = np.zeros((1, 32, 128), np.uint8)
    w13[0, :16, 0] = np.array(2, E4M3).view(np.uint8)
    w13[0, 16:, 0] = np.array(-1, E4M3).view(np.uint8)
    w13_scale = np.ones((1, 1, 1), F32)
    args = (*one_hot_token(128), *ALL_TO_EXPERT_0)
    w2 = identity_w2(128, 16)
    y = mega_moe(*args, w13, w13_scale, *w2, requantize=False)
    assert np.allclose(y[0, :16], -1.7615941559557649, rtol=1e-15) and not y[0, 16:].any()
    y = mega_moe(*args, w13, w13_scale, *w2, requantize=False, gate_up="up_first")
    assert np.allclose(y[0, :16], -0.5378828427399902, rtol=1e-15)
    exchanged = np.roll(w13, 16, axis=1)
    y = mega_moe(*args, exchanged, w13_scale, *w2, requantize=False, gate_up="up_first")
    assert np.allclose(y[0, :16], -1.7615941559557649, rtol=1e-15)


def test_scale_block_across_gate_and_up_by_hand():
    # 192 gate rows: block 1 of the scale holds gate rows 128 to 191 and up rows 0 to 63.
    w13 = np.zeros((1, 384, 256), np.uint8)
    w13[0, :, 0] = ONE
    w13_scale = np.ones((1, 3, 2), F32)
    w13_scale[0, :, 0] = 1, 2, 4
    y = mega_moe(
        *one_hot_token(256),
        *ALL_TO_EXPERT_0,
        w13,
        w13_scale,
        *identity_w2(256, 192),
        requantize=False,
    )
    silu_1, silu_2 = 1 / (1 + math.exp(-1)), 2 / (1 + math.exp(-2))
    expected = [silu_1 * 2] * 64 + [silu_1 * 4] * 64 + [silu_2 * 4] * 64 + [0] * 64
    assert np.allclose(y[0], expected, rtol=1e-15)


def test_silu_of_extremes():
    x = np.array([-1000.0, -40.0, 0.0, 40.0, 1000.0])
    expected = [0.0, -40 * math.exp(-40), 0.0, 40.0, 1000.0]
    with np.errstate(all="raise", under="ignore"):
        assert np.allclose(silu(x), expected, rtol=1e-14, atol=0)


def test_input_forms_agree():
    layer = random_layer(2, 128, 64, seed=8)
    x, ids, weights = random_tokens(5, 128, 2, 2, seed=8)
    weights = fp8.round_bf16(weights)
    expected = mega_moe(*quantize_tokens(x), ids, weights, *layer, requantize=True)
    codes, scale = quantize_tokens(x)
    bits = fp8.encode_bf16(x)
    for form in [
        (x, None),
        (bits, None),
        (fp8.view_bf16(bits), None),
        (fp8.view_e4m3(codes), scale),
    ]:
        for w in (weights, fp8.encode_bf16(weights), weights.astype(ml_dtypes.bfloat16)):
            assert np.array_equal(mega_moe(*form, ids, w, *layer, requantize=True), expected)


def test_requantisation_error_is_that_of_fp8():
    layer = random_layer(4, 512, 384, seed=9)
    tokens = random_tokens(16, 512, 4, 2, seed=9)
    exact = mega_moe(tokens.x, None, *tokens[1:], *layer, requantize=False)
    rounded = mega_moe(tokens.x, None, *tokens[1:], *layer, requantize=True)
    assert 0.01 < relative_error(rounded, exact) < 0.04


def test_misfits_are_refused():
    layer = random_layer(2, 256, 64, seed=10)
    x, ids, weights = random_tokens(3, 256, 2, 2, seed=10)
    with pytest.raises(
        ValueError, match="gate_up must be one of gate_first, up_first, .*, got 'gate'"
    ):
        mega_moe(x, None, ids, weights, *layer, requantize=False, gate_up="gate")
    with pytest.raises(ValueError, match=r"w13 \(2, 128, 256\).*do not fit"):
        mega_moe(x[:, :128], None, ids, weights, *layer, requantize=False)
    with pytest.raises(ValueError, match="topk_ids .* do not fit"):
        mega_moe(x, None, ids[:2], weights, *layer, requantize=False)
    with pytest.raises(ValueError, match=r"must have shape \(1, 2\), got \(2, 2\)"):
        wrong = layer._replace(w13_scale=np.ones((2, 2, 2), F32))
        mega_moe(x, None, ids, weights, *wrong, requantize=False)


# Number formats.


def saturated_e4m3(values):
    with np.errstate(invalid="ignore"):  # some NaN bits signal
        codes = np.clip(values, -448, 448).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(values), 0x7F, codes)


def test_encode_e4m3_inverts_decode():
    codes = np.arange(256, dtype=np.uint8)
    values = fp8.decode_e4m3(codes)
    assert values[[0x00, 0x01, 0x08, ONE, 0x7E, 0xFE]].tolist() == [0, 2**-9, 2**-6, 1, 448, -448]
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    expected = np.where(np.isnan(values), 0x7F, codes)
    assert np.array_equal(fp8.encode_e4m3(values), expected)


def test_encode_e4m3_against_ml_dtypes():
    # Every upper half of a float32 (all signs, exponents and 7 mantissa bits) with lower halves
    # around the ties; ties between e4m3 values lie at the upper halves alone.
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (high | low).view(F32)
    assert np.array_equal(fp8.encode_e4m3(values), saturated_e4m3(values))
    finite = fp8.decode_e4m3(np.arange(0x7F, dtype=np.uint8))
    ties = (finite[1:] + finite[:-1]) / 2
    near = np.concatenate([np.nextafter(ties, F32(0)), ties, np.nextafter(ties, F32(np.inf))])
    near = np.concatenate([near, -near])
    assert np.array_equal(fp8.encode_e4m3(near), saturated_e4m3(near))


def test_bf16_against_ml_dtypes():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = fp8.decode_bf16(bits)
    assert np.array_equal(values, bits.view(ml_dtypes.bfloat16).astype(F32), equal_nan=True)
    high = bits.astype(np.uint32)[:, None] << 16
    values = (high | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(F32)
    assert np.array_equal(fp8.round_bf16(values), bf16(values), equal_nan=True)


@pytest.mark.parametrize("channels", [128, 256, 208])
def test_quantize_tokens_formula(channels):
    x = random_tokens(7, channels, 1, 1, seed=11, outliers=9).x
    codes, scale = quantize_tokens(x)
    assert (
        codes.dtype == np.uint8 and scale.dtype == F32 and scale.shape == (7, -(-channels // 128))
    )
    for start in range(0, channels, 128):
        group = x[:, start : start + 128]
        amax = np.abs(group).max(axis=1, keepdims=True)
        assert np.array_equal(scale[:, start // 128], (amax * F32(1 / 448))[:, 0])
        expected = saturated_e4m3(group * (F32(448) / amax))
        assert np.array_equal(codes[:, start : start + 128], expected)
        assert (codes[:, start : start + 128] & 0x7F).max(axis=1).tolist() == [0x7E] * 7
    error = np.abs(fp8.dequantize_tokens(codes, scale) - x)
    assert (error <= np.abs(x) / 16 * 1.001 + np.repeat(scale, 128, 1)[:, :channels] * 2**-10).all()


def test_quantize_zero_and_tiny_rows():
    x = np.zeros((3, 128), F32)
    x[1, 5] = 1e-30
    x[2, 5] = 1e-10
    codes, scale = quantize_tokens(x)
    assert np.array_equal(scale, np.full((3, 1), F32(1e-10) * F32(1 / 448)))
    assert codes[:, 5].tolist() == [0, 0, 0x7E] and not np.delete(codes, 5, axis=1).any()
    assert not fp8.dequantize_tokens(codes, scale)[:2].any()
    layer = random_layer(1, 128, 128, seed=12)
    ids, weights = np.zeros((3, 1), np.int32), np.ones((3, 1), F32)
    y = mega_moe(codes, scale, ids, weights, *layer, requantize=True)
    assert np.isfinite(y).all() and not y[:2].any()


def test_quantize_weights_with_ragged_blocks():
    w = np.random.default_rng(13).standard_normal((2, 3, 200, 300), dtype=F32)
    w[1, 2, 130, 260] = 100
    codes, scale = quantize_weights(w)
    assert codes.shape == w.shape and scale.shape == (2, 3, 2, 3)
    for row, col in np.ndindex(2, 3):
        block = w[1, 2, row * 128 : row * 128 + 128, col * 128 : col * 128 + 128]
        amax = np.abs(block).max()
        assert scale[1, 2, row, col] == amax * F32(1 / 448)
        part = codes[1, 2, row * 128 : row * 128 + 128, col * 128 : col * 128 + 128]
        assert np.array_equal(part, saturated_e4m3(block * (F32(448) / amax)))
    whole = fp8.dequantize_weights(codes[0, 0], scale[0, 0])
    assert relative_error(whole, w[0, 0]) < 0.04


# Measures of error and makers of data.


def test_relative_error():
    ref = np.array([[3.0, 4.0]])
    assert relative_error(ref, ref) == 0
    assert relative_error(np.array([[3.0, 4.5]]), ref) == pytest.approx(0.1)
    bits = fp8.encode_bf16(ref)
    assert relative_error(bits, ref) == 0
    for bad in (np.nan, np.inf):
        assert relative_error(np.array([[3.0, bad]]), ref) == math.inf
        assert relative_error(ref, np.array([[3.0, bad]])) == math.inf
    zeros = np.zeros((1, 2))
    assert relative_error(zeros, zeros) == 0 and relative_error(ref, zeros) == math.inf
    with pytest.raises(ValueError, match=r"shape of ref, \(1, 2\), got \(2,\)"):
        relative_error(ref[0], ref)


def test_worst_element():
    ref = np.array([[1000.0, -1000.0], [1.0, 1.0]])
    y = ref + [[0, 0], [0, 0.5]]
    assert relative_error(y, ref) < 1e-3  # the large row hides it
    assert worst_element(y, ref) == pytest.approx(0.25)
    assert worst_element(np.full((2, 2), np.nan), ref) == math.inf
    zeros = np.zeros((2, 2))
    assert worst_element(zeros, zeros) == 0 and worst_element(ref, zeros) == math.inf
    assert worst_element(np.zeros((0, 2)), np.zeros((0, 2))) == 0


def test_random_layer():
    layer = random_layer(2, 256, 192, seed=14)
    assert [part.shape for part in layer] == [(2, 384, 256), (2, 3, 2), (2, 256, 192), (2, 2, 2)]
    assert [part.dtype for part in layer] == [np.uint8, F32, np.uint8, F32]
    w13 = fp8.dequantize_weights(layer.w13[1], layer.w13_scale[1])
    assert w13.std() * 16 == pytest.approx(1, rel=0.02)
    again = random_layer(2, 256, 192, seed=14)
    assert all(np.array_equal(a, b) for a, b in zip(layer, again, strict=True))
    assert not np.array_equal(layer.w13[0], layer.w13[1])
    columns = np.abs(
        fp8.dequantize_weights(*(p[0] for p in random_layer(1, 256, 64, 1, outliers=4)[:2]))
    )
    assert (columns.mean(axis=0) > 10 * np.median(columns)).sum() == 4


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [("channel", ((2, 384, 1), (2, 256, 1))), ("tensor", ((2, 1, 1), (2, 1, 1)))],
)
def test_layers_of_other_scales(kind, shapes):
    layer = random_layer(2, 256, 192, seed=14, format=f"fp8_{kind}")
    assert (layer.w13_scale.shape, layer.w2_scale.shape) == shapes
    blocks = random_layer(2, 256, 192, seed=14)
    for (codes, scale), (others, other) in ((layer[:2], blocks[:2]), (layer[2:], blocks[2:])):
        got, wanted = (
            fp8.dequantize_weights(codes[1], scale[1]),
            fp8.dequantize_weights(others[1], other[1]),
        )
        assert 0 < relative_error(got, wanted) < 0.05


def test_other_scales_mean_as_many_of_blocks_or_groups():
    """Of rows, of halves of rows and of all, each as an array of less and less dimensions."""
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)[:, :48]
    values = codes.view(E4M3).astype(np.float64)
    rows = np.array([1, 2, 3, 5], F32)
    for scale in (rows, rows[:, None]):
        for dequantize in (fp8.dequantize_weights, fp8.dequantize_tokens):
            got = dequantize(codes, scale)
            assert np.array_equal(got, values * rows[:, None], equal_nan=True)
    for scale in (rows[1:3], rows[1:3, None]):
        wanted = values * np.repeat(rows[1:3], 2)[:, None]
        assert np.array_equal(fp8.dequantize_weights(codes, scale), wanted, equal_nan=True)
    for scale in (rows[3], rows[3:], rows[3:, None]):
        got = fp8.dequantize_weights(codes, np.asarray(scale))
        assert np.array_equal(got, 5 * values, equal_nan=True)


@pytest.mark.parametrize("scales", ["group", "token", "tensor"])
def test_quantised_tokens_of_other_scales(scales):
    x = random_tokens(5, 256, 2, 1, seed=3).x
    codes, scale = quantize_tokens(x, scales=scales)
    assert scale.shape == {"group": (5, 2), "token": (5, 1), "tensor": (1,)}[scales]
    largest = np.abs(fp8.dequantize_tokens(codes, scale)).max()
    assert np.float32(largest) == pytest.approx(np.abs(x).max(), rel=1e-6)
    assert relative_error(fp8.dequantize_tokens(codes, scale), x) < 0.04


def test_e8m0():
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(ml_dtypes.float8_e8m0fnu).astype(F32)
    assert np.array_equal(fp8.decode_e8m0(codes), wanted, equal_nan=True)
    assert fp8.decode_e8m0(codes)[0] == 2.0**-127 and np.isnan(fp8.decode_e8m0(codes)[255])


def test_random_tokens():
    x, ids, weights = random_tokens(500, 256, 8, 3, seed=15, outliers=2)
    assert (x.dtype, ids.dtype, weights.dtype) == (F32, np.int32, F32)
    assert np.array_equal(x, fp8.round_bf16(x)) and (x.std(axis=0) > 20).sum() == 2
    assert all(len(set(row)) == 3 for row in ids.tolist()) and ids.min() == 0 and ids.max() == 7
    assert np.allclose(weights.sum(axis=1), 1) and (np.diff(weights, axis=1) <= 0).all()


def test_routings():
    def ids_of(routing):
        return random_tokens(600, 128, 8, 2, seed=16, routing=routing).topk_ids

    counts = np.bincount(ids_of("zipf")[:, 0], minlength=8)  # slot 0 is a draw by 1 / (1 + expert)
    assert np.allclose(counts / 600, 1 / np.arange(1, 9) / sum(1 / np.arange(1, 9)), atol=0.05)
    assert (ids_of("hot_expert") == 4).any(axis=1).all()
    assert len(set(ids_of("hot_expert").ravel().tolist())) == 8
    unused = ids_of("unused")
    assert 0.25 < ((unused < 0) | (unused >= 8)).mean() < 0.42
    assert unused.min() == -1 and unused.max() >= 8
    duplicates = ids_of("duplicates")
    assert (duplicates[:, 0] == duplicates[:, 1]).any() and duplicates.min() >= 0
    with pytest.raises(ValueError, match="routing must be one of uniform, .*, got 'round_robin'"):
        ids_of("round_robin")
    with pytest.raises(ValueError, match="top_k up to num_experts=2, got 3; take duplicates"):
        random_tokens(1, 128, 2, 3, seed=0)
    assert random_tokens(1, 128, 2, 3, seed=0, routing="duplicates").topk_ids.shape == (1, 3)
