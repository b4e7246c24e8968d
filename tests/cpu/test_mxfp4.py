"""MXFP4 in array arithmetic, against ml_dtypes and against scales packed one at a time."""

import ml_dtypes
import numpy as np
import pytest
from exact import LEAST_EXPONENT

from jitmoe import fp8
from jitmoe.mxfp4 import dequantize_mxfp4, pack_scales, packed_shape, quantize_mxfp4
from jitmoe.reference import mega_moe, random_layer, random_tokens

E2M1, E8M0, F32 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu, np.float32
ONE = 127  # e8m0 of 1
MIDDLES = F32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def split(codes):
    """Two codes to a byte, the first in the low half, one to a byte."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def rounded(values):
    """e2m1 codes by ml_dtypes."""
    return values.astype(E2M1).view(np.uint8) & 15


# Codes


def test_every_code_times_every_scale():
    pairs = np.arange(256, dtype=np.uint8)  # every low half beside every high half
    codes = np.broadcast_to(pairs.reshape(1, 16, 16), (255, 16, 16)).reshape(255 * 16, 16)
    scales = np.arange(255, dtype=np.uint8).repeat(16)[:, None]
    values = dequantize_mxfp4(codes, scales)
    numbers = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64)
    wanted = numbers[split(codes)] * scales.view(E8M0).astype(np.float64)
    assert values.dtype == np.float64 and np.array_equal(values, wanted)
    assert np.array_equal(np.signbit(values), np.signbit(wanted))
    assert values.max() == 6 * 2.0**127 and values[values > 0].min() == 2.0**-128


def test_nan_scales_give_nan():
    codes = np.full((2, 16), 0x21, np.uint8)
    values = dequantize_mxfp4(codes, np.uint8([[255], [ONE]]))
    assert np.isnan(values[0]).all() and np.array_equal(values[1], np.tile([0.5, 1], 16))


def test_quantising_what_codes_mean_gives_them_back():
    """Of every scale but the last two, for 6 times these is no float. Groups that reach 4 at least
    have the scale they came from.
    """
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (253, 48), dtype=np.uint8)
    codes[:, ::16] = 0xE7  # 6 and -4
    scales = rng.permuted(np.tile(np.arange(253, dtype=np.uint8), (3, 1)), axis=1).T.copy()
    values = dequantize_mxfp4(codes, scales)
    assert np.array_equal(values, values.astype(F32))
    again, same = quantize_mxfp4(values)
    assert np.array_equal(same, scales) and np.array_equal(again, codes)


# Quantising


def test_to_nearest_even():
    """Every number in 1 / 128 up to 8, ties and their neighbours, beside a 4 that fixes the
    scale to 1.
    """
    steps = np.arange(0, 8, 1 / 128, dtype=F32)
    near = np.concatenate([np.nextafter(MIDDLES, F32(0)), MIDDLES, np.nextafter(MIDDLES, F32(9))])
    numbers = np.concatenate([steps, near, -steps, -near])
    groups = np.zeros((numbers.size, 32), F32)
    groups[:, 0], groups[:, 1] = 4, numbers
    codes, scales = quantize_mxfp4(groups)
    assert (scales == ONE).all() and (split(codes)[:, 0] == 6).all()
    assert np.array_equal(split(codes)[:, 1], rounded(numbers))
    ties = quantize_mxfp4(np.concatenate([[4], MIDDLES, np.zeros(24)])[None])[0]
    assert split(ties)[0, 1:8].tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_scale_is_that_of_the_largest():
    """amax of 4 to just below 8 times the scale; what is beyond 6 saturates."""
    amax = F32([4, 4.5, 5, 6, 7, np.nextafter(F32(8), F32(0)), 8, 3.999])
    groups = np.zeros((amax.size, 32), F32)
    groups[:, 5] = -amax
    codes, scales = quantize_mxfp4(groups)
    assert (scales[:, 0] - ONE).tolist() == [0] * 6 + [1, 255]  # of 8, 1; of 3.999, -1
    assert (split(codes)[:, 5]).tolist() == [14, 14, 14, 15, 15, 15, 14, 15]
    assert not np.delete(split(codes), 5, axis=1).any()


def test_random_groups_against_ml_dtypes():
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((40, 256)) * np.exp2(rng.integers(-20, 20, (40, 1)))).astype(F32)
    codes, scales = quantize_mxfp4(w)
    groups = w.reshape(40, 8, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=2).astype(np.float64))) - 2
    assert np.array_equal(scales, exponents + 127)
    scaled = groups / np.exp2(exponents)[..., None].astype(F32)
    assert np.array_equal(split(codes), rounded(scaled.reshape(40, 256)))
    values = dequantize_mxfp4(codes, scales)
    error = np.abs(values - w).reshape(40, 8, 32) / np.exp2(exponents)[..., None]
    assert error.max() < 2  # of just below 8, which saturates at 6
    assert np.linalg.norm(values - w) / np.linalg.norm(w) < 0.13


def test_zeros_and_their_signs():
    w = np.zeros((2, 64), F32)
    w[1] = -0.0
    codes, scales = quantize_mxfp4(w)
    values = dequantize_mxfp4(codes, scales)
    assert not values.any() and np.signbit(values).tolist() == [[False] * 64, [True] * 64]
    assert (scales < 254 - 66).all(), "kernels take them"


def test_smallest_and_largest_floats():
    """Scales end at 2^-127 and below 2^127: what is smaller than half the least code is zero."""
    tiny = np.float64([2.0**-126, 2.0**-127, 2.0**-128, 2.0**-129, 2.0**-130, 2.0**-149])
    groups = np.zeros((7, 32), F32)
    groups[:6, 3], groups[6, 3] = tiny, np.finfo(F32).max
    codes, scales = quantize_mxfp4(groups)
    assert scales[:, 0].tolist() == [0] * 6 + [ONE + 125]
    values = dequantize_mxfp4(codes, scales)[:, 3]
    assert values.tolist() == [*tiny[:3], 0, 0, 0, 6 * 2.0**125]


def test_bits_of_bf16_are_numbers():
    w = fp8.round_bf16(np.random.default_rng(2).standard_normal((3, 5, 96), F32))
    for same in (fp8.encode_bf16(w), w.astype(ml_dtypes.bfloat16), w.astype(np.float64)):
        for got, wanted in zip(quantize_mxfp4(same), quantize_mxfp4(w), strict=True):
            assert np.array_equal(got, wanted)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0, 4)])
def test_shapes(lead):
    codes, scales = quantize_mxfp4(np.ones((*lead, 96), F32))
    assert (codes.shape, codes.dtype) == ((*lead, 48), np.uint8)
    assert (scales.shape, scales.dtype) == ((*lead, 3), np.uint8)
    values = dequantize_mxfp4(codes, scales)
    assert values.shape == (*lead, 96) and (values == 1).all()


@pytest.mark.parametrize("shape", [(4, 2), (4, 4), (3, 3), (12,)])
def test_scales_of_another_shape_are_refused(shape):
    codes = np.zeros((4, 48), np.uint8)
    with pytest.raises(ValueError, match=r"packed codes must have shape \[4, 3\], got \["):
        dequantize_mxfp4(codes, np.full(shape, ONE, np.uint8))


# Packed scales


FORMATS = ("mxfp4_fp8", "mxfp4_bf16")
LARGEST = {"mxfp4_fp8": 254, "mxfp4_bf16": 188}
ORDERS = (None, "gate_first", "up_first", "interleaved")
SIZES = [(512, 8), (256, 4), (64, 1), (288, 3), (448, 5), (32, 9), (544, 2)]  # rows, groups


def row_of_tile(tile, row, rows, gate_up):
    """Row `row` of a tile, as the tensor map of w13 or w2 lands them, in the matrix of an expert;
    None behind its end.
    """
    if gate_up is None:
        found = 256 * tile + row
        return found if found < rows else None
    channel = 128 * tile + row // 16 * 8 + row % 8  # 8 rows of the first half, 8 of the second
    second = row // 8 % 2
    if channel >= rows // 2:
        return None
    return 2 * channel + second if gate_up == "interleaved" else second * (rows // 2) + channel


def num_tiles_of(rows, gate_up):
    return -(-rows // 256) if gate_up is None else -(-(rows // 2) // 128)


def words_slowly(scales, gate_up):
    """Of mxfp4_bf16: what lane l of warp w of warpgroup g reads as 16 bytes: words of rows
    16w + l/4 and + 8 of its first block of 64, of those of its second; a byte for each chunk of the
    k-block, of the scale times 2^66.
    """
    num_experts, rows, groups = scales.shape
    num_tiles = num_tiles_of(rows, gate_up)
    packed = np.zeros((num_experts, num_tiles, -(-groups // 4), 256, 4), np.uint8)
    for tile, k, g, w, i, m, half in np.ndindex(num_tiles, packed.shape[2], 2, 4, 8, 2, 2):
        in_tile = 128 * g + 64 * m + 16 * w + i + 8 * half
        row = row_of_tile(tile, in_tile, rows, gate_up)
        word = ((4 * g + w) * 8 + i) * 4 + 2 * m + half
        for c in range(4):
            if row is not None and 4 * k + c < groups:
                packed[:, tile, k, word, c] = scales[:, row, 4 * k + c].astype(int) + 66
    return packed.view("<u4")[..., 0]


def exponents_slowly(scales, gate_up):
    """Of mxfp4_fp8: f32 of the tile's rows; then of every k-block, for each warp of 64 rows, what
    lanes read that expand rows i, i + 8, .. + 56: 16 bits for a row, four for a chunk. Of an even
    number of k-blocks.
    """
    num_experts, rows, groups = scales.shape
    num_tiles, k_blocks = num_tiles_of(rows, gate_up), -(-groups // 8) * 2
    packed = np.zeros((num_experts, num_tiles, 1024 + 512 * k_blocks), np.uint8)
    for expert, tile, in_tile in np.ndindex(num_experts, num_tiles, 256):
        row = row_of_tile(tile, in_tile, rows, gate_up)
        if row is None:
            continue
        codes = [int(code) for code in scales[expert, row]]
        value = F32(2.0 ** (max(codes) - 127 - 6))
        packed[expert, tile, 4 * in_tile : 4 * in_tile + 4] = np.frombuffer(value.tobytes(), "u1")
        warp, i, eighth = in_tile // 64, in_tile % 8, in_tile // 8 % 8
        for group, code in enumerate(codes):
            at = 1024 + group // 4 * 512 + warp * 128 + i * 16 + eighth * 2 + group % 4 // 2
            exponent = max(LEAST_EXPONENT - (max(codes) - code), 0)
            packed[expert, tile, at] |= exponent << 4 * (group % 2)
    return packed.view("<u4")


SLOWLY = {"mxfp4_fp8": exponents_slowly, "mxfp4_bf16": words_slowly}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gate_up", ORDERS)
@pytest.mark.parametrize("rows, groups", SIZES)
def test_pack_scales(rows, groups, gate_up, format):
    """Scales of a row that all count, and any."""
    rng = np.random.default_rng(rows)
    shape = 2, rows, groups
    near = rng.integers(20, 100, (2, rows, 1)) + rng.integers(0, 18, shape)
    far = rng.integers(0, LARGEST[format] + 1, shape)
    for scales in (near.astype(np.uint8), far.astype(np.uint8)):
        packed = pack_scales(scales, format, gate_up)
        assert packed.dtype == np.uint32 and packed.flags.c_contiguous
        assert packed.shape == packed_shape(*shape[:2], 32 * groups, format, gate_up)
        assert np.array_equal(packed, SLOWLY[format](scales, gate_up))


def test_every_distance_from_the_largest():
    """Exponents end at 0: of the least scale that counts, and of anything less."""
    top = LEAST_EXPONENT
    distances = np.array([0, 1, 2, top - 1, top, top + 1, top + 2, 100])
    scales = np.full((1, 256, 8), 200, np.uint8)
    scales[0, :8, 0] = 200 - distances
    scales[0, 8:16, 7] = 200 - distances
    packed = pack_scales(scales, "mxfp4_fp8", None)[0, 0]
    halves = packed[256:].view("<u2").reshape(2, 4, 8, 8)  # k-blocks, warps, rows of 8 by column
    nibbles = halves[..., None] >> np.array([0, 4, 8, 12]) & 15
    wanted = np.full((2, 4, 8, 8, 4), top)
    wanted[0, 0, :, 0, 0] = wanted[1, 0, :, 1, 3] = [top, top - 1, top - 2, 1, 0, 0, 0, 0]
    assert np.array_equal(nibbles, wanted)
    assert (packed[:256].view(F32) == 2.0 ** (200 - 133)).all(), "another chunk has the largest"


def test_rows_of_the_smallest_and_largest_scales():
    """f32 has 2^-133 of code 0 as a subnormal, and all above, exactly."""
    codes = np.array([*range(16), 126, 127, 253, 254], np.uint8)
    scales = np.zeros((1, 32, 4), np.uint8)
    scales[0, : codes.size, 2] = codes
    packed = pack_scales(scales, "mxfp4_fp8", None)[0, 0]
    values = packed[: codes.size].view(F32).astype(np.float64)
    assert values.tolist() == [2.0 ** (int(code) - 133) for code in codes]
    assert (packed[: codes.size] != 0).all() and not packed[32:256].any(), "rows past the end"


def test_up_rows_first_are_two_halves_too():
    """Which of them is which is up to the kernel."""
    scales = np.random.default_rng(0).integers(100, 140, (3, 320, 4)).astype(np.uint8)
    for format in FORMATS:
        first, second = (pack_scales(scales, format, o) for o in ("gate_first", "up_first"))
        assert np.array_equal(first, second)


@pytest.mark.parametrize("format", FORMATS)
def test_strided_scales_are_packed(format):
    scales = np.random.default_rng(0).integers(100, 140, (2, 320, 8)).astype(np.uint8)
    apart = np.zeros((4, 320, 24), np.uint8)[::2, :, ::3]
    apart[...] = scales
    for order in ORDERS:
        wanted = pack_scales(scales, format, order)
        assert np.array_equal(pack_scales(apart, format, order), wanted)


@pytest.mark.parametrize("gate_up", ORDERS)
@pytest.mark.parametrize("format, power", [("mxfp4_fp8", 127), ("mxfp4_bf16", 61)])
def test_scales_too_large_and_nan_are_refused(format, power, gate_up):
    scales, largest = np.full((2, 64, 4), 120, np.uint8), LARGEST[format]
    scales[1, 40, 3] = largest
    pack_scales(scales, format, gate_up)
    for code in {largest + 1, 255}:
        scales[1, 40, 3] = code
        said = rf"scales of {format} must be up to 2\^{power}, got e8m0 code {code}; 255 is NaN"
        with pytest.raises(ValueError, match=said):
            pack_scales(scales, format, gate_up)


# The oracle


@pytest.mark.parametrize("format", FORMATS)
def test_layers(format):
    layer = random_layer(3, 256, 96, seed=1, format=format)
    shapes = [(3, 192, 128), (3, 192, 8), (3, 256, 48), (3, 256, 3)]
    assert [part.shape for part in layer] == shapes
    assert all(part.dtype == np.uint8 for part in layer)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("requantize", [False, True])
def test_oracle_is_that_of_dequantised_weights(format, requantize):
    """As floats beside tokens in bf16; e4m3 tokens beside weights that are e4m3 as well."""
    layer = random_layer(3, 256, 96, seed=1, format=format)
    x, *routing = random_tokens(9, 256, 3, 2, seed=2)
    plain = [dequantize_mxfp4(layer[i], layer[i + 1]) for i in (0, 2)]
    y = mega_moe(x, None, *routing, *layer, requantize=requantize, format=format)
    if format == "mxfp4_bf16":
        wanted = mega_moe(x, None, *routing, plain[0], None, plain[1], None, requantize=requantize)
    else:
        # 2^-9 is the least of e4m3: numbers in steps of it.
        units = [np.abs(w).max(axis=(1, 2), keepdims=True).max() / 448 for w in plain]
        units = [2.0 ** np.ceil(np.log2(unit)) for unit in units]
        codes = [fp8.encode_e4m3(w / unit) for w, unit in zip(plain, units, strict=True)]
        for w, code, unit in zip(plain, codes, units, strict=True):
            assert np.array_equal(fp8.decode_e4m3(code) * unit, w)
        scales = [np.full((3, 1, 1), unit, F32) for unit in units]
        call = x, None, *routing, codes[0], scales[0], codes[1], scales[1]
        wanted = mega_moe(*call, requantize=requantize)
    assert np.array_equal(y, wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_oracle_refuses_what_does_not_fit(format):
    layer = random_layer(2, 256, 96, seed=1, format=format)
    x, *routing = random_tokens(3, 256, 2, 1, seed=2)
    with pytest.raises(ValueError, match="do not fit each other"):
        mega_moe(x[:, :128], None, *routing, *layer, requantize=False, format=format)
    wrong = layer._replace(w2_scale=layer.w2_scale[..., :2])
    with pytest.raises(ValueError, match=r"must have shape \[256, 3\], got \[256, 2\]"):
        mega_moe(x, None, *routing, *wrong, requantize=False, format=format)
