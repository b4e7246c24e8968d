"""MXFP4 weights beside tokens in e4m3 and in bf16, emulated, against the oracle: expanded into
registers (decode) and in shared memory (prefill).
"""

import dataclasses

import numpy as np
import pytest
from cancelling import HIDDEN as CANCELLING_HIDDEN
from cancelling import cancel, repeat
from exact import HIDDEN as EXACT_HIDDEN
from exact import (
    LEAST_EXPONENT,
    NUM_EXPERTS,
    every_code,
    exact_inputs,
    exact_layer,
    intermediate_of,
)

from jitmoe import Activation, ExpertWeights, fp8, mega_moe, reference, trace
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import Call, EmulatedLayer
from jitmoe.measure import EXACT_BOUNDS
from jitmoe.mxfp4 import dequantize_mxfp4
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem
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
    "whole": (256, 256, 4),
    "ragged": (352, 224, 6),
    "narrow": (32, 32, 2),
    "one expert": (544, 352, 1),
}
BOTH = pytest.mark.parametrize("format", FORMATS)
KERNELS = tuple((format, bucket) for format in FORMATS for bucket in ("decode", "prefill"))
ALL = pytest.mark.parametrize("format, bucket", KERNELS)
BUCKETS = pytest.mark.parametrize("bucket", ["decode", "prefill"])
SHORTEST = {"decode": {"num_stages": 3}, "prefill": {"num_stages": 2, "num_packed_stages": 2}}


def plan_for(format, bucket, *sizes, **fields):
    """Of hidden, intermediate, experts, top_k; for any number of tokens."""
    num_tokens = {"decode": 1, "prefill": MAX_TOKENS}[bucket]
    plan = choose(MoeProblem(num_tokens, *sizes, format), GPUS["h200"])
    assert plan.bucket == bucket
    return dataclasses.replace(plan, **fields)


def make(format, bucket, sizes, max_tokens, checked=False, **fields):
    hidden, intermediate, experts = SIZES[sizes]
    plan = plan_for(format, bucket, hidden, intermediate, experts, TOP_K, **fields)
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


@pytest.fixture(scope="module", params=[(*k, s) for k in KERNELS for s in SIZES], ids=str)
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


@pytest.fixture(scope="module", params=KERNELS, ids="-".join)
def ragged(request):
    return make(*request.param, "ragged", max_tokens=300)


@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_routings(ragged, routing):
    check(ragged, 140, routing)


@pytest.mark.parametrize(
    "num_rows", [1, 8, 9, 16, 17, 24, 25, 32, 33, 64, 65, 128, 135, 144, 145, 260]
)
def test_widths(ragged, num_rows):
    """Columns of a multiply: 8, 16, 24 (W4A8 in decode), 32 and 64, full and not; then several
    tiles of an expert. In prefill tokens are rows beyond 64, and a last tile takes up to 16 tokens
    along.
    """
    check(ragged, num_rows, "one_expert")


@BUCKETS
@pytest.mark.parametrize("scales", ["group", "token", "tensor"])
@pytest.mark.parametrize("num_tokens", [1, 20, 200])
def test_tokens_in_e4m3(num_tokens, scales, bucket):
    check(make("mxfp4_fp8", bucket, "ragged", 200), num_tokens, scales=scales)


@BOTH
@pytest.mark.parametrize("num_local_pairs, checked", [(10, True), (4096, False)])
def test_sorts(format, num_local_pairs, checked):
    """By each block, which puts the channels of a token in order on their way into its ring, and by
    the whole grid, which does so before; in one stream.
    """
    emulated = make(format, "decode", "ragged", 40, checked, num_local_pairs=num_local_pairs)
    check_stream(emulated, (40, 3, 20, 1, 40))


@BOTH
@pytest.mark.parametrize("checked", [False, True])
def test_launches_in_a_stream(format, checked):
    """Of prefill: what one leaves behind is the next one's."""
    max_tokens = 90 if checked else 300
    emulated = make(format, "prefill", "ragged", max_tokens, checked)
    check_stream(emulated, (max_tokens, 3, 70, 1, max_tokens))


def check_stream(emulated, token_counts):
    kinds = [None, "group", "token"] if emulated.plan.quantizes else [None]
    calls = [
        call_of(emulated.plan, n, seed=n, scales=kinds[i % len(kinds)])
        for i, n in enumerate(token_counts)
    ]
    for call, y in zip(calls, emulated.run_in_stream(calls, seed=1), strict=True):
        assert_close(y, call, emulated.layer, emulated.plan.format)


@ALL
def test_every_seed_gives_the_same_bits(format, bucket):
    emulated = make(format, bucket, "ragged", 300)
    call = call_of(emulated.plan, 300 if bucket == "prefill" else 70)
    first = emulated(*call)
    assert all(np.array_equal(emulated(*call, seed=seed), first) for seed in (5, 6))


@BOTH
def test_rows_do_not_depend_on_their_batch(format):
    """Tiles of other widths, the same bits."""
    emulated = make(format, "decode", "ragged", 200)
    x, ids, router = call_of(emulated.plan, 150, "zipf")
    y = emulated(x, ids, router)
    for rows in (np.random.default_rng(0).permutation(150), np.arange(40, 60), [17]):
        assert np.array_equal(emulated(x[rows], ids[rows], router[rows]), y[rows])


# Races, launches of a stream


@ALL
def test_no_race_and_nothing_undefined(format, bucket):
    """With rings as short as they may be: stages are used again."""
    emulated = make(format, bucket, "ragged", 140, checked=True, **SHORTEST[bucket])
    check(emulated, 70)
    check(emulated, 40, "one_expert")
    if bucket == "prefill":
        check(emulated, 140, "one_expert")  # 12 of them beside a tile's own
    if emulated.plan.quantizes:
        check(emulated, 20, scales="group")


@BOTH
@pytest.mark.parametrize("checked", [False, True])
def test_launches_overlap(format, checked):
    """What comes late, from the launch before, is x, ids and weights; weights and ids that were
    read early may be others'.
    """
    emulated = make(format, "decode", "ragged", 12, checked=checked)
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
    "format, bucket, hidden, intermediate", [(*k, *s) for k in KERNELS for s in PARTS[k[0]]]
)
def test_tiles_in_parts(format, bucket, hidden, intermediate):
    """Few tiles and many k-blocks, which decode cuts."""
    plan = plan_for(format, bucket, hidden, intermediate, 1, 1)
    layer = reference.random_layer(1, hidden, intermediate, seed=1, format=format)
    x, *routing = reference.random_tokens(3, hidden, 1, 1, seed=2)
    call = fp8.encode_bf16(x), *routing
    y = EmulatedLayer(plan, layer, max_tokens=3, num_blocks=8)(*call)
    assert_close(y, call, layer, format)


@BOTH
def test_sums_that_cancel(format):
    """In parts they are exactly opposite; batch_invariant adds up as larger batches do, of which
    the largest would take prefill.
    """
    largest = 200
    layer = reference.random_layer(3, CANCELLING_HIDDEN, 32, seed=1, format=format)
    cancel(layer.w13, layer.w13_scale, signs=0x88)
    weights = wrap(layer, format)
    x, ids, router = reference.random_tokens(largest, CANCELLING_HIDDEN, 3, 1, seed=2, outliers=64)
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
    buckets = [choose(weights.problem(n, 1), GPUS["h200"]).bucket for n in (40, largest)]
    assert buckets == ["decode", "prefill"]
    for num_tokens in (12, 40, largest):
        assert np.array_equal(run(num_tokens, batch_invariant=True)[:1], alone)


# Exactness


@ALL
@pytest.mark.parametrize("num_tokens", [1, 40, 200])
def test_exact_sums_give_the_bits_of_the_formula(format, bucket, num_tokens):
    layer, inputs = exact_layer(format), exact_inputs(num_tokens)
    plan = plan_for(format, bucket, EXACT_HIDDEN, intermediate_of(format), NUM_EXPERTS, TOP_K)
    emulated = EmulatedLayer(plan, layer, num_tokens, num_blocks=3)
    wanted = fp8.encode_bf16(inputs.formula(layer, format))
    for x_is_fp8 in {False, plan.quantizes}:
        given = inputs.argument(x_is_fp8)
        y = emulated(given, inputs.topk_ids, inputs.topk_weights, hardware_sums=plan.quantizes)
        assert np.array_equal(y, wanted)


@ALL
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_every_code_and_scale_reaches_its_place(format, bucket, num_tokens):
    made = every_code(num_tokens)
    hidden, half = made.layer.w13.shape[2] * 2, made.layer.w2.shape[2] * 2
    plan = plan_for(format, bucket, hidden, half, 1, 1)
    y = EmulatedLayer(plan, made.layer, num_tokens, num_blocks=3)(*made.call)
    assert np.array_equal(fp8.decode_bf16(y), made.y)


@BUCKETS
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_scales_too_small_to_count(bucket, num_tokens):
    """Of 32 weights whose scale is 2^-12 of the row's largest scale S, or less, each is wrong by
    6 * 2^-12 * S at most: it may be taken for 0, and its scale for 2^-12 * S. So y is wrong by no
    more than that, times the sum of the magnitudes of what they are multiplied by.
    """
    hidden, half, rng = 256, 256, np.random.default_rng(3)
    layer = reference.random_layer(1, hidden, half, seed=1, format="mxfp4_fp8")
    w2, groups = layer.w2.copy(), half // 32
    largest = rng.integers(115, 125, (1, hidden, 1))
    is_small = rng.random((1, hidden, groups)) < 0.4
    is_small[:, ::2, 1:] = True  # all but one chunk, which is zeros
    is_small[..., 0] = False
    w2[:, ::2, :16] = 0
    beyond = np.array([0, 1, 2, 15, 90])
    distance = np.where(is_small, LEAST_EXPONENT + rng.choice(beyond, is_small.shape), 0)
    plan = plan_for("mxfp4_fp8", bucket, hidden, half, 1, 1)
    x = rng.standard_normal((num_tokens, hidden)).astype(np.float32)
    call = fp8.encode_bf16(x), np.zeros((num_tokens, 1), np.int32), np.ones((num_tokens, 1), "f4")

    def run(distance):
        given = layer._replace(w2=w2, w2_scale=(largest - distance).astype(np.uint8))
        y = EmulatedLayer(plan, given, num_tokens, num_blocks=3)(*call)
        return fp8.decode_bf16(y), oracle(call, given, "mxfp4_fp8", requantize=True)

    y, wanted = run(distance)
    assert np.array_equal(y, run(np.minimum(distance, LEAST_EXPONENT))[0])
    one_more = run(np.maximum(distance - 1, 0))
    assert reference.relative_error(one_more[0][:, ::2], one_more[1][:, ::2]) > 0.1, "others too"
    all_count = run(np.minimum(distance, LEAST_EXPONENT - 1))
    assert reference.relative_error(all_count[0][:, ::2], all_count[1][:, ::2]) < ROUNDED_BOUND

    # Activations: y of the formula where w2 is the identity.
    w13 = dequantize_mxfp4(layer.w13, layer.w13_scale)
    plain = fp8.decode_bf16(call[0]), None, *call[1:], w13, None, np.eye(hidden)[None], None
    middle = reference.mega_moe(*plain, requantize=False)
    unit = 6 * 2.0**-LEAST_EXPONENT * np.exp2(largest[0, :, 0] - 127.0)
    bound = np.abs(middle) @ is_small[0].repeat(32, axis=1).T * unit
    rounded = ROUNDED_BOUND * np.abs(wanted[:, 1::2]).max()
    assert (np.abs(y - wanted)[:, ::2] <= 1.1 * bound[:, ::2]).all(), "e4m3 has 4 % of noise"
    assert (np.abs(y - wanted)[:, 1::2] <= 1.1 * bound[:, 1::2] + 4 * rounded).all()


@ALL
@pytest.mark.parametrize("largest_of", ["gate", "w2"])
def test_largest_scales(format, bucket, largest_of):
    """That kernels take, against scales and tokens as much smaller elsewhere; a group of zeros has
    any.
    """
    largest, half, num_tokens = {"mxfp4_fp8": 254, "mxfp4_bf16": 188}[format], 64, 5
    smaller = max(largest - 236, 0)
    layer = reference.random_layer(2, 128, half, seed=1, format=format)
    w13_scale, w2_scale = (part.astype(int) for part in (layer.w13_scale, layer.w2_scale))
    x, *routing = reference.random_tokens(num_tokens, 128, 2, 1, seed=2)
    if largest_of == "gate":  # that is silu(gate) too, or zero
        step = largest - w13_scale[:, :half].max()
        w13_scale[:, :half] += step
        w13_scale[:, half:] -= step - 16 - 2 * smaller
        w2_scale -= 16
        x = np.ldexp(x, -smaller)
    else:
        w13_scale -= 8 + smaller // 2
        w2_scale += largest - w2_scale.max()
    layer.w2[:, 5, :16] = 0  # a group of 32
    w2_scale[:, 5, 0] = 0
    scales = w13_scale.astype(np.uint8), w2_scale.astype(np.uint8)
    assert np.array_equal(scales[0], w13_scale) and np.array_equal(scales[1], w2_scale)
    layer = layer._replace(w13_scale=scales[0], w2_scale=scales[1])
    call = fp8.encode_bf16(x), *routing
    plan = plan_for(format, bucket, 128, half, 2, 1)
    y = EmulatedLayer(plan, layer, num_tokens, num_blocks=2)(*call)
    ref = oracle(call, layer, format, requantize=True)
    assert np.isfinite(ref).all() and ref.any()
    assert reference.relative_error(y, ref) < ROUNDED_BOUND


# Variants, through the door


HIDDEN = 352
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
    sizes = EXPERTS, HIDDEN, INTERMEDIATE
    layer = reference.random_layer(*sizes, seed=1, format=format)
    options, named = dict(variant), {}
    order = {"gate_up": options.pop("gate_up", "gate_first")}
    if options.pop("has_bias", False):
        biases = random_biases(*sizes, seed=3)
        named = {"w13_bias": biases.w13, "w2_bias": biases.w2}
    weights = wrap(layer, format, **named, **order)
    for num_tokens, kind in ((7, None), (150, None), (20, "group"), (300, None), (160, "group")):
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


@ALL
def test_traces(format, bucket):
    num_tokens = {"decode": 20, "prefill": 200}[bucket]
    layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format=format)
    weights = wrap(layer, format)
    x, *routing = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, 2)
    call = fp8.encode_bf16(x), *routing
    out = np.empty_like(call[0])
    traced = trace(*call, weights, out=out, backend="emulated")
    assert ("expand" in traced.summary().busy) == (bucket == "prefill")
    assert len(traced.select("mma")) == len(traced.select("epilogue")) > 0
    assert np.array_equal(out, mega_moe(*call, weights, backend="emulated"))


@ALL
def test_expert_counts(format, bucket):
    num_tokens = {"decode": 20, "prefill": 200}[bucket]
    layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format=format)
    weights = wrap(layer, format)
    x, ids, router = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, 2, "unused")
    call, counts = (fp8.encode_bf16(x), ids, router), np.full(EXPERTS, 5, np.int32)
    y = mega_moe(*call, weights, expert_counts=counts, backend="emulated")
    assert counts.tolist() == [5 + (ids == expert).sum() for expert in range(EXPERTS)]
    assert np.array_equal(y, mega_moe(*call, weights, backend="emulated"))
