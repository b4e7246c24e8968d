"""MXFP4 weights and calls of NumPy arrays, emulated: what is taken and what is refused."""

import ml_dtypes
import numpy as np
import pytest

from jitmoe import ExpertWeights, MoeProblem, fp8, mega_moe, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 4, 256, 96, 2, 9
FORMATS = ("mxfp4_fp8", "mxfp4_bf16")
BOTH = pytest.mark.parametrize("format", FORMATS)
LAYER = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format="mxfp4_fp8")
X, *ROUTING = reference.random_tokens(TOKENS, HIDDEN, EXPERTS, TOP_K, 2, "unused")
BITS, CODES = fp8.encode_bf16(X), fp8.quantize_tokens(X)


def has_compiler():
    try:
        return compiler() is not None
    except NoHostCompiler:
        return False


emulated = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


def wrap(format="mxfp4_fp8", **changes):
    return ExpertWeights(**LAYER._asdict() | {"format": format} | changes)


def run(weights, x=BITS, **options):
    return mega_moe(x, *ROUTING, weights, backend="emulated", **options)


def refusal(call, kind=ValueError):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and len(message) < 300, "one sentence"
    return message


# Taken


@BOTH
def test_weights_are_read(format):
    weights = wrap(format)
    sizes = weights.num_experts, weights.hidden, weights.intermediate
    assert sizes == (EXPERTS, HIDDEN, INTERMEDIATE)
    assert weights.format == weights.problem(1, 2).format == format
    assert repr(weights).endswith(f"device=host, format={format!r})")
    codes = 3 * EXPERTS * HIDDEN * INTERMEDIATE // 2
    # Whole tiles, 1 of w13 and of w2, of 2 k-blocks and 1: four bytes a row, or two beside f32,
    # where their number is even.
    row_bytes = 4 * (2 + 1) if format == "mxfp4_bf16" else 2 * 4 + 2 * (2 + 2)
    assert weights.num_bytes == codes + EXPERTS * 256 * row_bytes


def test_largest_scales_are_taken():
    """Up to 2^127 beside e4m3 tokens, whose kernels multiply by them last."""
    assert wrap(w2_scale=too_large(254)).format == "mxfp4_fp8"
    assert wrap("mxfp4_bf16", w2_scale=too_large(188)).format == "mxfp4_bf16"


@emulated
@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", "interleaved"])
def test_results_in_prefill(gate_up):
    """Tokens in bf16 and in e4m3, with a scale for each 128 channels, each token, all."""
    num_tokens = 200
    x, *routing = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, 3, "unused")
    weights = wrap(gate_up=gate_up)
    assert choose(weights.problem(num_tokens, TOP_K), GPUS["h200"]).bucket == "prefill"
    for scales in (None, "group", "token", "tensor"):
        codes = fp8.quantize_tokens(x, scales=scales or "group")
        given = fp8.encode_bf16(x) if scales is None else codes
        y = mega_moe(given, *routing, weights, backend="emulated")
        ref = reference.mega_moe(
            *codes, *routing, *LAYER, requantize=True, format="mxfp4_fp8", gate_up=gate_up
        )
        assert reference.relative_error(y, ref) < 4e-3


@emulated
@BOTH
def test_results(format):
    for x in (BITS, CODES) if format == "mxfp4_fp8" else (BITS,):
        y = run(wrap(format), x)
        assert isinstance(y, np.ndarray) and (y.shape, y.dtype) == (X.shape, np.uint16)
        given = x if isinstance(x, tuple) else (x, None)
        ref = reference.mega_moe(*given, *ROUTING, *LAYER, requantize=True, format=format)
        assert reference.relative_error(y, ref) < 4e-3


@emulated
@BOTH
def test_types_strides_and_out(format):
    """Scales as e8m0; rows of codes, scales and y apart: the same bits."""

    def apart(array, gap):
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + gap), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]

    y = run(wrap(format))
    e8m0 = {
        name: getattr(LAYER, name).view(ml_dtypes.float8_e8m0fnu)
        for name in ("w13_scale", "w2_scale")
    }
    assert np.array_equal(run(wrap(format, **e8m0)), y)
    strided = {name: apart(part, 16) for name, part in LAYER._asdict().items()}
    memory = np.full((TOKENS, HIDDEN + 64), 7, np.uint16)
    out = memory[:, :HIDDEN]
    assert run(wrap(format, **strided), out=out) is out
    assert np.array_equal(out, y) and (memory[:, HIDDEN:] == 7).all()


@emulated
@BOTH
def test_tokens_by_their_type_give_y_of_it(format):
    y = run(wrap(format), X.astype(ml_dtypes.bfloat16))
    assert y.dtype == ml_dtypes.bfloat16
    assert np.array_equal(y.view(np.uint16), run(wrap(format)))


@emulated
@BOTH
def test_codes_are_views_and_scales_are_copies(format):
    codes, scales = LAYER.w2.copy(), LAYER.w2_scale.copy()
    weights = wrap(format, w2=codes, w2_scale=scales)
    y = run(weights)
    scales += 1
    assert np.array_equal(run(weights), y)
    codes ^= 0x88
    assert np.array_equal(fp8.decode_bf16(run(weights)), -fp8.decode_bf16(y))


# Refused


FLOATS = np.ones((EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32), np.float32)


def too_large(code, scales=LAYER.w2_scale):
    scales = scales.copy()
    scales[2, 17, 1] = code
    return scales


@pytest.mark.parametrize(
    "changes, parts",
    [
        (
            {"format": "mxfp4"},
            ["format must be mxfp4_fp8 or mxfp4_bf16, got 'mxfp4'; leave it out"],
        ),
        ({"format": "fp8_block"}, ["got 'fp8_block'", "found by dtype and scales"]),
        ({"format": 4}, ["format must be mxfp4_fp8 or mxfp4_bf16, got 4"]),
        ({"scales": "block"}, ["scales must be None for mxfp4_fp8, got 'block'; leave it out"]),
        ({"gate_up": "down"}, ["gate_up must be one of", "got 'down'"]),
        ({"w13_scale": None}, ["w13 is u8 and needs both scales, got w2_scale; pass"]),
        ({"w2_scale": None}, ["needs both scales, got w13_scale; pass"]),
        ({"w13_scale": None, "w2_scale": None}, ["needs both scales, got none; pass"]),
        ({"w13": LAYER.w13.view(np.int8)}, ["w13 must have dtype u8, got i8; convert or view"]),
        ({"w2": LAYER.w2.view(np.int8)}, ["w2 must have dtype u8, got i8; convert or view"]),
        ({"w13": LAYER.w13.view(ml_dtypes.float8_e4m3fn)}, ["w13 must have dtype u8, got e4m3"]),
        ({"w13": LAYER.w13.reshape(4, 192, 8, 16)}, ["w13 must have shape [num_experts", "8, 16]"]),
        ({"w13": LAYER.w13[:, :191]}, ["2 * intermediate, hidden]", "[4, 191, 128]"]),
        ({"w13": LAYER.w13[:, :160]}, ["intermediate must be a multiple of 32", "got 80; pad"]),
        ({"w13": LAYER.w13[..., :88].copy()}, ["hidden must be a multiple of 32", "got 176; pad"]),
        ({"w2": LAYER.w2[:, :128]}, ["w2 must have shape [4, 256, 48], got [4, 128, 48]"]),
        (
            {"w2": np.zeros((4, 256, 64), np.uint8)},
            ["w2 must have shape [4, 256, 48], got [4, 256"],
        ),
        ({"w2": np.zeros((4, 256, 52), np.uint8)[..., :48]}, ["w2 must start at multiples of 16"]),
        ({"w13_scale": FLOATS}, ["w13_scale must have dtype e8m0 or u8, got f32; convert or view"]),
        (
            {"w13_scale": LAYER.w13_scale[..., :7]},
            ["w13_scale must have shape [4, 192, 8], got [4, 192, 7]; pass a scale for each 32"],
        ),
        (
            {"w2_scale": LAYER.w2_scale[:3]},
            ["w2_scale must have shape [4, 256, 3], got [3, 256, 3]; pass a scale for each 32"],
        ),
        (
            {"w2_scale": too_large(255)},
            ["w2_scale: scales of mxfp4_fp8 must be up to 2^127, got e8m0 code 255; 255 is NaN: "],
        ),
        ({"w13_scale": too_large(255, LAYER.w13_scale)}, ["w13_scale: ", "code 255; 255 is NaN"]),
        (
            {"w2_scale": too_large(189), "format": "mxfp4_bf16"},
            ["w2_scale: scales of mxfp4_bf16 must be up to 2^61, got e8m0 code 189"],
        ),
        ({"w2_bias": np.zeros((4, 256), np.float32)}, ["w13_bias must be given where the other"]),
    ],
)
def test_weights_that_do_not_fit(changes, parts):
    message = refusal(lambda: wrap(**changes))
    assert all(part in message for part in parts), message


def test_hidden_of_bf16_tokens_is_a_multiple_of_32():
    layer = reference.random_layer(EXPERTS, 96, INTERMEDIATE, seed=1, format="mxfp4_bf16")
    assert ExpertWeights(**layer._asdict(), format="mxfp4_bf16").hidden == 96
    short = layer._asdict() | {"w13": layer.w13[..., :40].copy()}
    message = refusal(lambda: ExpertWeights(**short, format="mxfp4_bf16"))
    assert "hidden must be a multiple of 32 up to 16,384, got 80" in message


def test_codes_without_a_format_are_taken_for_e4m3():
    """Whose hidden is half as large, which w2 does not fit."""
    message = refusal(lambda: ExpertWeights(**LAYER._asdict()))
    assert message.startswith("w2 must have shape [4, 128, 96], got [4, 256, 48]")


def test_tokens_that_do_not_fit():
    for x in (CODES, CODES[0], (fp8.view_e4m3(CODES[0]), CODES[1])):
        message = refusal(lambda x=x: run(wrap("mxfp4_bf16"), x))
        assert message == (
            "x is e4m3 and the weights are mxfp4_bf16; pass x in bf16, without scales"
        )
    assert "x is e4m3 and has no scales" in refusal(lambda: run(wrap("mxfp4_fp8"), CODES[0]))
    message = refusal(lambda: run(wrap("mxfp4_fp8"), BITS[:, :128]))
    assert message.startswith("x must have shape [*, 256], got [9, 128]")


@BOTH
def test_plans_of_another_format_are_refused(format):
    other = "mxfp4_fp8" if format == "mxfp4_bf16" else "fp8_block"
    plan = choose(MoeProblem(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, other), GPUS["h200"])
    message = refusal(lambda: run(wrap(format), plan=plan))
    assert f"the plan is for format {other!r}, the call has {format!r}; plan again" in message
