"""MXFP4 weights beside tokens in e4m3 and in bf16, emulated, against the oracle."""

import dataclasses

import numpy as np
import pytest
from cancelling import MX_HIDDEN, cancel, repeat
from exact import HIDDEN as EXACT_HIDDEN
from exact import NUM_EXPERTS, exact_inputs, exact_layer, intermediate_of

from jitmoe import Activation, ExpertWeights, fp8, mega_moe, reference, trace
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import Call, EmulatedLayer
from jitmoe.measure import EXACT_BOUNDS
from jitmoe.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem
from jitmoe.reference_biases import random_biases

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

FORMATS = ("mxfp4_fp8", "mxfp4_bf16")
ROUNDED_BOUND, WORST_BOUND = 4e-3, 0.06
TOP_K = 2
# hidden, intermediate, experts: k-blocks of 128 that end where the row does and, 32 or 96 channels
# before, inside; tiles of 128 channels and 256 rows that do and do not; one k-block; one expert.
SIZES = {
    "mxfp4_fp8": {
        "whole": (256, 256, 4),
        "ragged": (384, 224, 6),
        "narrow": (128, 32, 2),
        "one expert": (640, 352, 1),
    },
    "mxfp4_bf16": {
        "whole": (256, 256, 4),
        "ragged": (352, 224, 6),
        "narrow": (32, 32, 2),
        "one expert": (544, 352, 1),
    },
}
BOTH = pytest.mark.parametrize("format", FORMATS)


def make(format, sizes, max_tokens, checked=False, **fields):
    hidden, intermediate, experts = SIZES[format][sizes]
    problem = MoeProblem(max_tokens, hidden, intermediate, experts, TOP_K, format)
    plan = dataclasses.replace(choose(problem, GPUS["h200"]), **fields)
    assert plan.bucket == "decode", "for any number of tokens"
    layer = reference.random_layer(experts, hidden, intermediate, seed=1, format=format)
    return EmulatedLayer(plan, layer, max_tokens, num_blocks=3, checked=checked)


def wrap(layer, format, **options):
    scales = layer.w13_scale, layer.w2_scale
    return ExpertWeights(layer.w13, layer.w2, *scales, format=format, **options)


def call_of(plan, num_tokens, routing="unused", seed=2, scales=None):
    """x in bf16, or quantised with a scale for each group, token or tensor; ids, weights."""
    if plan.num_experts < TOP_K:
        routing = "duplicates"
    sizes = num_tokens, plan.hidden, plan.num_experts, TOP_K
    x, ids, router = reference.random_tokens(*sizes, seed, routing)
    x = fp8.encode_bf16(x) if scales is None else fp8.quantize_tokens(x, scales=scales)
    return x, ids, router


def oracle(call, layer, format, **variant):
    x, *routing = call
    x = x if isinstance(x, tuple) else (x, None)
    return reference.mega_moe(*x, *routing, *layer, format=format, **variant)


def assert_close(y, call, layer, format, **variant):
    rounded, exact = (
        oracle(call, layer, format, requantize=rounds, **variant) for rounds in (True, False)
    )
    assert reference.relative_error(y, rounded) < ROUNDED_BOUND
    assert reference.worst_element(y, rounded) < WORST_BOUND
    if isinstance(call[0], tuple) or format == "mxfp4_bf16":  # x is what the formula takes
        assert reference.relative_error(y, exact) < EXACT_BOUNDS[format]


def check(emulated, num_tokens, routing="unused", seed=2, scales=None):
    call = call_of(emulated.plan, num_tokens, routing, seed, scales)
    y = emulated(*call, seed=seed)
    assert_close(y, call, emulated.layer, emulated.plan.format)
    return y


@pytest.fixture(scope="module", params=[(f, s) for f in FORMATS for s in SIZES[f]], ids=str)
def emulated(request):
    return make(*request.param, max_tokens=300)


# Sizes, routings, widths of tiles


@pytest.mark.parametrize("num_tokens", [1, 9, 70, 300])
def test_token_counts(emulated, num_tokens):
    check(emulated, num_tokens, seed=num_tokens)


def test_no_tokens(emulated):
    check(emulated, 5)
    x, ids, router = call_of(emulated.plan, 5)
    assert emulated(x[:0], ids[:0], router[:0]).shape == (0, emulated.plan.hidden)
    check(emulated, 5)


@pytest.fixture(scope="module", params=FORMATS)
def ragged(request):
    return make(request.param, "ragged", max_tokens=200)


@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_routings(ragged, routing):
    check(ragged, 140, routing)


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 135])
def test_widths(ragged, num_rows):
    """Columns of a multiply: 8, 16, 32 and 64, full and not; then several tiles of an expert."""
    check(ragged, num_rows, "one_expert")


@pytest.mark.parametrize("scales", ["group", "token", "tensor"])
@pytest.mark.parametrize("num_tokens", [1, 20, 100])
def test_tokens_in_e4m3(num_tokens, scales):
    check(make("mxfp4_fp8", "ragged", 200), num_tokens, scales=scales)


@BOTH
@pytest.mark.parametrize("num_local_pairs, checked", [(10, True), (4096, False)])
def test_sorts(format, num_local_pairs, checked):
    """By each block, which puts the channels of a token in order on their way into its ring, and by
    the whole grid, which does so before; in one stream.
    """
    emulated = make(format, "ragged", 40, checked, num_local_pairs=num_local_pairs)
    kinds = [None, "group", "token"] if format == "mxfp4_fp8" else [None]
    calls = [
        call_of(emulated.plan, n, seed=n, scales=kinds[i % len(kinds)])
        for i, n in enumerate((40, 3, 20, 1, 40))
    ]
    for call, y in zip(calls, emulated.run_in_stream(calls, seed=1), strict=True):
        assert_close(y, call, emulated.layer, format)


@BOTH
def test_every_seed_gives_the_same_bits(format):
    emulated = make(format, "ragged", 200)
    call = call_of(emulated.plan, 70)
    first = emulated(*call)
    assert all(np.array_equal(emulated(*call, seed=seed), first) for seed in (5, 6))


@BOTH
def test_rows_do_not_depend_on_their_batch(format):
    """Tiles of other widths, the same bits."""
    emulated = make(format, "ragged", 200)
    x, ids, router = call_of(emulated.plan, 150, "zipf")
    y = emulated(x, ids, router)
    for rows in (np.random.default_rng(0).permutation(150), np.arange(40, 60), [17]):
        assert np.array_equal(emulated(x[rows], ids[rows], router[rows]), y[rows])


# Races, launches of a stream


@BOTH
def test_no_race_and_nothing_undefined(format):
    """With a ring as short as it may be: stages are used again."""
    emulated = make(format, "ragged", 70, checked=True, num_stages=3)
    check(emulated, 70)
    check(emulated, 40, "one_expert")
    if emulated.plan.quantizes:
        check(emulated, 20, scales="group")


@BOTH
@pytest.mark.parametrize("checked", [False, True])
def test_launches_overlap(format, checked):
    """What comes late, from the launch before, is x, ids and weights; weights and ids that were
    read early may be others'.
    """
    emulated = make(format, "ragged", 12, checked=checked)
    plan, scales = emulated.plan, "group" if format == "mxfp4_fp8" else None
    assert not plan.needs_whole_grid(12, x_is_bf16=scales is None)
    old, new = (call_of(plan, 12, "uniform", seed, scales) for seed in (1, 2))
    x = dict(zip(("x", "x_scale"), new[0], strict=True)) if scales else {"x": new[0]}
    late = x | {"topk_ids": new[1], "topk_weights": new[2]}
    for seed in range(1 if checked else 3):
        calls = [Call(*old), Call(*old, {"topk_ids": new[1]}), Call(*old, late)]
        ys = emulated.run_in_stream(calls, seed=seed)
        for y, call in zip(ys, (old, (old[0], new[1], old[2]), new), strict=True):
            assert_close(y, call, emulated.layer, format)


# Parts along k


PARTS = {  # hidden, intermediate: 33 k-blocks of 128 channels in one of the GEMMs
    "mxfp4_fp8": [(4224, 96), (128, 4128)],
    "mxfp4_bf16": [(4160, 96), (160, 4128)],
}


@pytest.mark.parametrize(
    "format, hidden, intermediate", [(f, *s) for f in FORMATS for s in PARTS[f]]
)
def test_tiles_in_parts(format, hidden, intermediate):
    """Few tiles and many k-blocks."""
    problem = MoeProblem(3, hidden, intermediate, 1, 1, format)
    plan = choose(problem, GPUS["h200"])
    layer = reference.random_layer(1, hidden, intermediate, seed=1, format=format)
    x, *routing = reference.random_tokens(3, hidden, 1, 1, seed=2)
    call = fp8.encode_bf16(x), *routing
    y = EmulatedLayer(plan, layer, max_tokens=3, num_blocks=8)(*call)
    assert_close(y, call, layer, format)


@BOTH
def test_sums_that_cancel(format):
    """In parts they are exactly opposite; batch_invariant adds up as larger batches do."""
    layer = reference.random_layer(3, MX_HIDDEN, 32, seed=1, format=format)
    cancel(layer.w13, layer.w13_scale, signs=0x88)
    weights = wrap(layer, format)
    x, ids, router = reference.random_tokens(40, MX_HIDDEN, 3, 1, seed=2, outliers=64)
    codes, scale = fp8.quantize_tokens(x)
    x = fp8.encode_bf16(x)
    repeat(codes, scale)
    repeat(x, scale)

    def run(num_tokens, **options):
        rows = slice(num_tokens)
        first = (codes[rows], scale[rows]) if format == "mxfp4_fp8" else x[rows]
        return mega_moe(first, ids[rows], router[rows], weights, backend="emulated", **options)

    assert not (run(1) & 0x7FFF).any()
    alone = run(1, batch_invariant=True)
    assert (alone & 0x7FFF).any(), "rounding errors"
    for num_tokens in (12, 40):
        assert np.array_equal(run(num_tokens, batch_invariant=True)[:1], alone)


# Exactness


@BOTH
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_exact_sums_give_the_bits_of_the_formula(format, num_tokens):
    layer, inputs = exact_layer(format), exact_inputs(num_tokens)
    sizes = EXACT_HIDDEN, intermediate_of(format), NUM_EXPERTS, TOP_K
    plan = choose(MoeProblem(num_tokens, *sizes, format), GPUS["h200"])
    emulated = EmulatedLayer(plan, layer, num_tokens, num_blocks=3)
    wanted = fp8.encode_bf16(inputs.formula(layer, format))
    for x_is_fp8 in {False, plan.quantizes}:
        given = inputs.argument(x_is_fp8)
        y = emulated(given, inputs.topk_ids, inputs.topk_weights, hardware_sums=plan.quantizes)
        assert np.array_equal(y, wanted)


@BOTH
def test_every_code_and_scale_reaches_its_place(format):
    """Row by row through GEMM 2, by hand: row r of w2 has one code, in channel 37r, and one scale
    that counts; gate 64, whose silu it is, and up as the channel says.
    """
    hidden, half = 512, 256
    w13, w2 = np.zeros((1, 2 * half, hidden)), np.zeros((1, hidden, half))
    channels, rows = np.arange(half), np.arange(hidden)
    ups = channels % 7 - 3.0
    ups[ups == 0] = 4
    w13[0, :half, 0], w13[0, half:, 0] = 64, 0
    w13[0, half + channels, (channels * 83 + 1) % hidden] = ups.clip(-3)
    picked = rows * 37 % half
    numbers = np.array([0.5, 1, 1.5, 2, 3, 4, 6, -6])[rows * 5 % 8] * 2.0 ** (rows % 11 - 5)
    w2[0, rows, picked] = numbers
    codes = [quantize_mxfp4(w) for w in (w13, w2)]
    assert all(
        np.array_equal(dequantize_mxfp4(*code), w) for code, w in zip(codes, (w13, w2), strict=True)
    )
    layer = reference.Layer(*codes[0], *codes[1])
    plan = choose(MoeProblem(1, hidden, half, 1, 1, format), GPUS["h200"])
    x = fp8.encode_bf16(np.ones((1, hidden), np.float32))
    y = EmulatedLayer(plan, layer, 1, num_blocks=3)(
        x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    )
    wanted = 64 * ups[picked] * numbers
    np.testing.assert_allclose(fp8.decode_bf16(y)[0], wanted, rtol=2**-4 + 2**-8)
    if format == "mxfp4_bf16":
        assert np.array_equal(fp8.decode_bf16(y)[0], wanted)


@BOTH
@pytest.mark.parametrize("largest_of", ["gate", "w2"])
def test_largest_scales(format, largest_of):
    """That kernels take, against scales as much smaller elsewhere; a group of zeros has any."""
    largest, half = {"mxfp4_fp8": 236, "mxfp4_bf16": 188}[format], 64
    layer = reference.random_layer(2, 128, half, seed=1, format=format)
    w13_scale, w2_scale = (part.astype(int) for part in (layer.w13_scale, layer.w2_scale))
    if largest_of == "gate":  # that is silu(gate) too, or zero
        step = largest - w13_scale[:, :half].max()
        w13_scale[:, :half] += step
        w13_scale[:, half:] -= step - 16
        w2_scale -= 16
    else:
        w13_scale -= 8
        w2_scale += largest - w2_scale.max()
    layer.w2[:, 5, :16] = 0  # a group of 32
    w2_scale[:, 5, 0] = 0
    scales = w13_scale.astype(np.uint8), w2_scale.astype(np.uint8)
    assert np.array_equal(scales[0], w13_scale) and np.array_equal(scales[1], w2_scale)
    layer = layer._replace(w13_scale=scales[0], w2_scale=scales[1])
    x, *routing = reference.random_tokens(5, 128, 2, 1, seed=2)
    call = fp8.encode_bf16(x), *routing
    plan = choose(MoeProblem(5, 128, half, 2, 1, format), GPUS["h200"])
    y = EmulatedLayer(plan, layer, 5, num_blocks=2)(*call)
    ref = oracle(call, layer, format, requantize=True)
    assert np.isfinite(ref).all() and ref.any()
    assert reference.relative_error(y, ref) < ROUNDED_BOUND


# Variants, through the door


HIDDEN = {"mxfp4_fp8": 384, "mxfp4_bf16": 352}
INTERMEDIATE, EXPERTS = 224, 4
VARIANTS = [
    {},
    {"gate_up": "up_first", "first_expert": 1},
    {"activation": Activation("swiglu_clamped", limit=0.5), "routed_scaling_factor": -2.5},
    {"apply_router_weight_on_input": True, "routed_scaling_factor": 2.0},
    {"gate_up": "interleaved", "has_bias": True, "activation": "swiglu_oai"},
    {"has_bias": True, "apply_router_weight_on_input": True, "activation": "geglu_tanh"},
]


@BOTH
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants(format, variant):
    sizes = EXPERTS, HIDDEN[format], INTERMEDIATE
    layer = reference.random_layer(*sizes, seed=1, format=format)
    options, named = dict(variant), {}
    order = {"gate_up": options.pop("gate_up", "gate_first")}
    if options.pop("has_bias", False):
        biases = random_biases(*sizes, seed=3)
        named = {"w13_bias": biases.w13, "w2_bias": biases.w2}
    weights = wrap(layer, format, **named, **order)
    for num_tokens, kind in ((7, None), (150, None), (20, "group")):
        if kind and format == "mxfp4_bf16":
            continue
        tokens = reference.random_tokens(num_tokens, sizes[1], EXPERTS, TOP_K, 2, "unused")
        x = fp8.quantize_tokens(tokens.x) if kind else fp8.encode_bf16(tokens.x)
        call = x, tokens.topk_ids, 3 * tokens.topk_weights
        y = mega_moe(*call, weights, backend="emulated", **options)

        def error(changes):
            wanted = options | order | named | changes
            ref = oracle(call, layer, format, requantize=True, **wanted)  # noqa: B023
            return reference.relative_error(y, ref)  # noqa: B023

        assert error({}) < ROUNDED_BOUND
        others = [o for o in ("gate_first", "up_first", "interleaved") if o != order["gate_up"]]
        assert all(error({"gate_up": other}) > 0.1 for other in others)
        for name in named:
            assert error({name: None}) > 0.03, name


@BOTH
def test_traces(format):
    layer = reference.random_layer(EXPERTS, HIDDEN[format], INTERMEDIATE, seed=1, format=format)
    weights = wrap(layer, format)
    x, *routing = reference.random_tokens(20, HIDDEN[format], EXPERTS, TOP_K, 2)
    call = fp8.encode_bf16(x), *routing
    out = np.empty_like(call[0])
    traced = trace(*call, weights, out=out, backend="emulated")
    assert traced.summary()
    assert len(traced.select("mma")) == len(traced.select("epilogue")) > 0
    assert np.array_equal(out, mega_moe(*call, weights, backend="emulated"))
