"""jitmoe.quantize: every format from one door, as ExpertWeights and the oracle take it."""

import numpy as np
import pytest

import jitmoe
from jitmoe import quantize, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.plan.formats import FORMATS

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, NUM_TOKENS = 3, 256, 96, 2, 7
# Of y, whose operands have the format's own noise.
NOISE = {name: {4: 0.25, 8: 0.08, 16: 0.01}[form.weight_bits] for name, form in FORMATS.items()}


def matrices():
    rng = np.random.default_rng(1)
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    return [rng.standard_normal(s, dtype=np.float32) * np.float32(s[2] ** -0.5) for s in shapes]


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_of_every_format(format):
    """Beside the layer of the numbers before."""
    floats = matrices()
    parts = [part for w in floats for part in quantize.weights(w, format)]
    call = reference.random_tokens(NUM_TOKENS, HIDDEN, EXPERTS, TOP_K, seed=2)
    x = quantize.tokens(call.x, format)
    ref = reference.mega_moe(*x, *call[1:], *parts, requantize=False, format=format)
    bits = [quantize.weights(w, "bf16")[0] for w in floats]
    tokens = quantize.tokens(call.x, "bf16")
    args = *tokens, *call[1:], bits[0], None, bits[1], None
    wanted = reference.mega_moe(*args, requantize=False)
    error = reference.relative_error(ref, wanted)
    assert error < NOISE[format] and (format == "bf16") == (error == 0)
    w13, w13_scale, w2, w2_scale = parts
    said = format if FORMATS[format].is_mx else None
    weights = jitmoe.ExpertWeights(w13, w2, w13_scale, w2_scale, format=said)
    assert weights.format == format
    assert (weights.num_experts, weights.hidden, weights.intermediate) == (3, 256, 96)
    scales = sum(scale.nbytes for scale in weights.tensors[2:] if scale is not None)
    assert weights.num_bytes == w13.nbytes + w2.nbytes + scales


def test_random_layers_are_made_by_it():
    made = reference.random_layer(1, 128, 64, seed=5, format="mxfp4_bf16")
    w = np.random.default_rng(5).standard_normal((128, 128), dtype=np.float32)
    codes, scale = quantize.weights(w * np.float32(128**-0.5), "mxfp4_bf16")
    assert np.array_equal(made.w13[0], codes) and np.array_equal(made.w13_scale[0], scale)


@pytest.mark.parametrize("function", [quantize.weights, quantize.tokens])
def test_other_formats_are_refused(function):
    with pytest.raises(ValueError, match="format must be one of fp8_block, .*, got 'int4'"):
        function(np.zeros((32, 128), np.float32), "int4")


@pytest.mark.parametrize("gate_up", ["gate_first", "interleaved"])
@pytest.mark.parametrize("format", ["mxfp4_fp8", "mxfp4_bf16"])
def test_packed_scales_are_used_in_place(format, gate_up):
    try:
        compiler()
    except NoHostCompiler as error:
        pytest.skip(str(error))
    (w13, w13_scale), (w2, w2_scale) = (quantize.weights(w, format) for w in matrices())
    packed = [
        quantize.pack_scales(scale, format, order)
        for scale, order in ((w13_scale, gate_up), (w2_scale, None))
    ]
    options = {"format": format, "gate_up": gate_up}
    weights = jitmoe.ExpertWeights(w13, w2, *packed, **options)
    assert weights.scale_addresses == tuple(scale.ctypes.data for scale in packed)
    others = jitmoe.ExpertWeights(w13, w2, w13_scale, w2_scale, **options)
    for num_tokens in (NUM_TOKENS, 150):
        call = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, seed=2)
        call = quantize.tokens(call.x, "bf16")[0], *call[1:]
        y, wanted = (jitmoe.mega_moe(*call, one, backend="emulated") for one in (weights, others))
        assert np.array_equal(y, wanted)


@pytest.mark.parametrize(
    "format, shape, message",
    [
        ("mxfp4_fp8", "3, 1, 512", "scales of mxfp4_fp8 must be up to 2"),
        ("mxfp4_bf16", "3, 1, 2, 256", "scales of mxfp4_bf16 must be up to 2"),
    ],
)
def test_packed_scales_that_do_not_fit(format, shape, message):
    (w13, w13_scale), (w2, w2_scale) = (quantize.weights(w, format) for w in matrices())
    packed = quantize.pack_scales(w13_scale, format, "gate_first")
    assert list(packed.shape) == [int(size) for size in shape.split(", ")]
    other = {"mxfp4_fp8": "mxfp4_bf16", "mxfp4_bf16": "mxfp4_fp8"}[format]
    of_other = quantize.pack_scales(w13_scale, other, "gate_first")
    few = shape.replace("3", "2", 1)
    for wrong, said in [
        (packed[..., ::-1], "w13_scale must be contiguous"),
        (packed[:2], rf"have shape \[{shape}\], got \[{few}\]; .* for this gate_up"),
        (of_other, rf"have shape \[{shape}\], got"),
        (w13_scale.astype(np.float32), "w13_scale must have dtype e8m0 or u8, got f32"),
        (np.full_like(w13_scale, 255), message),
    ]:
        with pytest.raises(ValueError, match=said):
            jitmoe.ExpertWeights(w13, w2, wrong, w2_scale, format=format)
