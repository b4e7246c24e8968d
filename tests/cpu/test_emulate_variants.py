"""Variants of the layer, emulated through the door in both buckets, against the oracle."""

import math

import numpy as np
import pytest

from jitmoe import Activation, ExpertWeights, fp8, mega_moe, reference, trace
from jitmoe.emulate.compile import NoHostCompiler, compiler

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

# Ragged ends of both GEMMs' tiles, and scale blocks that hold ends of both halves of w13. 150
# tokens are prefill: tiles with tokens as rows, and short ones with tokens as columns.
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 208, 2
BUCKETS = {"decode": 20, "prefill": 150}
LAYER = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1)
WEIGHTS = ExpertWeights(LAYER.w13, LAYER.w2, LAYER.w13_scale, LAYER.w2_scale)


def call_arrays(num_tokens, factor=1.0, seed=2):
    """x, ids and router weights. Gate and up have a standard deviation of about `factor`."""
    tokens = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, seed, routing="unused")
    return fp8.encode_bf16(np.float32(factor) * tokens.x), tokens.topk_ids, tokens.topk_weights


def oracle(given, layer=LAYER, **variant):
    x, ids, router = given
    return reference.mega_moe(x, None, ids, router, *layer, requantize=True, **variant)


def check(given, **variant):
    """One launch against the oracle, from which the plain layer is far; returns y."""
    y = mega_moe(*given, WEIGHTS, backend="emulated", **variant)
    ref = oracle(given, **variant)
    assert reference.relative_error(y, ref) < 4e-3
    assert reference.worst_element(y, ref) < 0.25
    return y


ACTIVATIONS = [
    "swiglu_clamped",
    "swiglu_oai",
    Activation("swiglu_clamped", limit=2.0),
    Activation("swiglu_oai", alpha=0.7, limit=3.0, up_offset=-0.5),
    "geglu_tanh",
    "geglu_erf",
]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation, bucket):
    given = call_arrays(BUCKETS[bucket], factor=5.0)
    y = check(given, activation=activation)
    assert reference.relative_error(y, oracle(given)) > 1e-2


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_clamps_that_cut_nothing_off(num_tokens):
    given = call_arrays(num_tokens)
    unlimited = Activation("swiglu_clamped", limit=math.inf)
    y = check(given, activation=unlimited)
    assert np.array_equal(y, mega_moe(*given, WEIGHTS, backend="emulated"))


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_clamps_do_not_hide_nan(num_tokens):
    x, ids, router = call_arrays(num_tokens)
    x[0] = 0x7FC0
    ids[0] = 0, 1
    y = mega_moe(x, ids, router, WEIGHTS, activation="swiglu_oai", backend="emulated")
    y = fp8.decode_bf16(y)
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


def up_first(layer):
    return ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, gate_up="up_first")


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_up_first(num_tokens, activation):
    given = call_arrays(num_tokens)
    y = mega_moe(*given, up_first(LAYER), activation=activation, backend="emulated")
    ref = oracle(given, activation=activation, gate_up="up_first")
    assert reference.relative_error(y, ref) < 4e-3
    assert reference.relative_error(y, oracle(given, activation=activation)) > 0.1


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_halves_exchanged_give_the_same_bits(num_tokens):
    """Rows of w13 and, where each half is whole blocks, rows of w13_scale."""
    layer = reference.random_layer(EXPERTS, HIDDEN, 256, seed=1)
    halves = [
        np.concatenate(np.split(part, 2, axis=1)[::-1], axis=1)
        for part in (layer.w13, layer.w13_scale)
    ]
    exchanged = layer._replace(w13=halves[0], w13_scale=halves[1])
    given = call_arrays(num_tokens)
    weights = ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)
    y = mega_moe(*given, weights, backend="emulated")
    assert np.array_equal(y, mega_moe(*given, up_first(exchanged), backend="emulated"))


def interleaved(layer):
    """Weights whose rows alternate, and scales of 128 such rows: for the oracle, and wrapped."""
    first, second = np.split(np.arange(layer.w13.shape[1]), 2)
    w13 = layer.w13[:, np.stack([first, second], axis=1).ravel()]
    layer = layer._replace(w13=w13)
    scales = layer.w13_scale, layer.w2_scale
    return layer, ExpertWeights(w13, layer.w2, *scales, gate_up="interleaved")


@pytest.mark.parametrize("num_tokens", [5, *BUCKETS.values()])
@pytest.mark.parametrize("intermediate, on_input", [(144, False), (208, True), (384, False)])
def test_interleaved(num_tokens, intermediate, on_input):
    layer, weights = interleaved(reference.random_layer(EXPERTS, HIDDEN, intermediate, seed=1))
    given = call_arrays(num_tokens)
    variant = {"activation": "swiglu_oai", "apply_router_weight_on_input": on_input}
    y = mega_moe(*given, weights, backend="emulated", **variant)
    ref = oracle(given, layer, gate_up="interleaved", **variant)
    assert reference.relative_error(y, ref) < 4e-3
    assert reference.worst_element(y, ref) < 0.25
    assert reference.relative_error(y, oracle(given, layer, **variant)) > 0.1


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_rows_interleaved_give_the_same_bits(num_tokens):
    """With one scale for all blocks, it does not matter in which a row is."""
    layer = LAYER._replace(w13_scale=np.full_like(LAYER.w13_scale, 2.0**-9))
    weights = ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)
    given = call_arrays(num_tokens)
    y = mega_moe(*given, weights, backend="emulated")
    assert np.array_equal(y, mega_moe(*given, interleaved(layer)[1], backend="emulated"))


@pytest.mark.parametrize("gate_up", ["gate", "up_gate", None, 1])
def test_other_orders_are_refused(gate_up):
    with pytest.raises(ValueError, match="gate_up must be one of gate_first, up_first, .*, got "):
        ExpertWeights(LAYER.w13, LAYER.w2, LAYER.w13_scale, LAYER.w2_scale, gate_up=gate_up)


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_routed_scaling_factor(num_tokens):
    given = call_arrays(num_tokens)
    check(given, routed_scaling_factor=2.5)
    whole, minus_half = (
        fp8.decode_bf16(mega_moe(*given, WEIGHTS, backend="emulated", routed_scaling_factor=f))
        for f in (1.0, -0.5)
    )
    assert np.array_equal(minus_half, -0.5 * whole)


@pytest.mark.parametrize("num_tokens", [5, *BUCKETS.values()])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_router_weight_on_input(num_tokens, activation):
    x, ids, router = call_arrays(num_tokens)
    given = x, ids, 3 * router  # of both sides of 1
    variant = {"activation": activation, "routed_scaling_factor": 1.5}
    y = check(given, apply_router_weight_on_input=True, **variant)
    assert reference.relative_error(y, oracle(given, **variant)) > 0.1


@pytest.mark.parametrize("num_tokens", [5, *BUCKETS.values()])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ranks_add_up(num_tokens, dtype):
    """Two ranks of two experts each know global ids; ids of others are unused slots."""
    x, ids, router = call_arrays(num_tokens)
    ids = ids.astype(dtype)
    ys = []
    for first in (0, 2):
        mine = reference.Layer(*(part[first : first + 2] for part in LAYER))
        weights = ExpertWeights(mine.w13, mine.w2, mine.w13_scale, mine.w2_scale)
        y = mega_moe(x, ids, router, weights, first_expert=first, backend="emulated")
        ref = oracle((x, ids, router), mine, first_expert=first)
        assert reference.relative_error(y, ref) < 4e-3
        ys.append(fp8.decode_bf16(y))
    assert reference.relative_error(sum(ys), oracle((x, ids, router))) < 8e-3


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("first_expert", [3, 255, 1 << 30])
def test_first_expert_moves_ids(num_tokens, dtype, first_expert):
    """The same bits, and no id outside the range becomes an address."""
    x, ids, router = call_arrays(num_tokens)
    info = np.iinfo(dtype)
    outside = np.array([-1, 0, first_expert - 1, first_expert + 4, info.min, info.max], dtype)
    is_used = (ids >= 0) & (ids < EXPERTS)
    others = np.random.default_rng(0).choice(outside, ids.shape)
    moved = np.where(is_used, ids.astype(dtype) + dtype(first_expert), others)
    y = mega_moe(x, ids, router, WEIGHTS, backend="emulated")
    options = {"first_expert": first_expert, "backend": "emulated"}
    assert np.array_equal(y, mega_moe(x, moved, router, WEIGHTS, **options))


@pytest.mark.parametrize("num_tokens", BUCKETS.values())
def test_traces_are_of_the_variant(num_tokens):
    given = call_arrays(num_tokens)
    variant = {
        "activation": Activation("swiglu_oai", limit=1.0),
        "routed_scaling_factor": 2.5,
        "apply_router_weight_on_input": True,
        "first_expert": 1,
    }
    out = np.empty_like(given[0])
    timeline = trace(*given, WEIGHTS, out=out, backend="emulated", **variant)
    assert timeline.summary()
    assert np.array_equal(out, mega_moe(*given, WEIGHTS, backend="emulated", **variant))


@pytest.mark.parametrize("num_tokens", [5, *BUCKETS.values()])
@pytest.mark.parametrize("quantised", [False, True])
def test_expert_counts(num_tokens, quantised):
    """Calls add up; unused slots and experts of other ranks do not count; y is what it was."""
    x, ids, router = call_arrays(num_tokens)
    ids[0] = 2, 2  # twice the same counts twice
    rows = fp8.quantize_tokens(fp8.decode_bf16(x)) if quantised else x
    options = {"first_expert": 1, "backend": "emulated"}
    wanted = np.array([(ids == 1 + expert).sum() for expert in range(EXPERTS)])
    counts = np.arange(7, 7 + EXPERTS, dtype=np.int32)
    y = mega_moe(rows, ids, router, WEIGHTS, expert_counts=counts, **options)
    assert np.array_equal(counts - np.arange(7, 7 + EXPERTS), wanted)
    assert np.array_equal(y, mega_moe(rows, ids, router, WEIGHTS, **options))
    mega_moe(rows, ids, router, WEIGHTS, expert_counts=counts, **options)
    assert np.array_equal(counts - np.arange(7, 7 + EXPERTS), 2 * wanted)


def test_no_tokens_count_nothing():
    counts = np.full(EXPERTS, 3, np.int32)
    mega_moe(*call_arrays(0), WEIGHTS, expert_counts=counts, backend="emulated")
    assert (counts == 3).all()


@pytest.mark.parametrize(
    "counts, message",
    [
        (np.zeros(EXPERTS, np.int64), "expert_counts must have dtype i32, got i64; convert"),
        (np.zeros(3, np.int32), r"expert_counts must have shape \[4\], got \[3\]; pass a counter"),
        (np.zeros(8, np.int32)[::2], "expert_counts must be contiguous, got strides .2.; make it"),
        (np.broadcast_to(np.int32(0), 4), "expert_counts must be contiguous"),
    ],
)
def test_other_counts_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        mega_moe(*call_arrays(3), WEIGHTS, expert_counts=counts, backend="emulated")


def test_counts_must_be_writable():
    counts = np.zeros(EXPERTS, np.int32)
    counts.flags.writeable = False
    with pytest.raises(ValueError, match="expert_counts must be writable, got a read-only array"):
        mega_moe(*call_arrays(3), WEIGHTS, expert_counts=counts, backend="emulated")


def test_unknown_activations_are_refused():
    with pytest.raises(ValueError, match="activation must be one of swiglu, .*, got 'gelu'; take"):
        mega_moe(*call_arrays(3), WEIGHTS, activation="gelu", backend="emulated")
