"""Experts in bf16, emulated in both buckets, against the oracle."""

import ml_dtypes
import numpy as np
import pytest

from jitmoe import Activation, ExpertWeights, fp8, mega_moe, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import Call, EmulatedLayer
from jitmoe.emulate.run import EmulationError
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.problem import MoeProblem

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

EXACT_BOUND, ROUNDED_BOUND, WORST_BOUND = 5e-3, 3e-3, 8e-3
TOP_K = 2
# hidden, intermediate, experts: k-blocks of 64 that end where the row does and inside, tiles of 128
# channels and 256 rows that do and do not, one expert.
SIZES = {
    "whole": (256, 256, 4),
    "ragged": (144, 208, 6),
    "wide": (576, 80, 4),
    "narrow": (16, 16, 2),
    "one expert": (320, 384, 1),
}


def make(sizes, bucket, max_tokens, checked=False, **fields):
    hidden, intermediate, experts = SIZES[sizes]
    problem = MoeProblem(1, hidden, intermediate, experts, TOP_K, "bf16")
    plan = plans_of_model(problem, GPUS["h200"], **fields)[bucket]
    layer = reference.random_layer(experts, hidden, intermediate, seed=1, format="bf16")
    return EmulatedLayer(plan, layer, max_tokens, num_blocks=3, checked=checked)


def tokens_of(emulated, num_tokens, routing, seed=2):
    plan = emulated.plan
    if plan.num_experts < TOP_K:
        routing = "duplicates"
    return reference.random_tokens(num_tokens, plan.hidden, plan.num_experts, TOP_K, seed, routing)


def check(emulated, num_tokens, routing="unused", seed=2):
    """One launch against both oracles; returns y."""
    tokens = tokens_of(emulated, num_tokens, routing, seed)
    x = fp8.encode_bf16(tokens.x)
    y = emulated(x, tokens.topk_ids, tokens.topk_weights, seed=seed)
    call = x, None, tokens.topk_ids, tokens.topk_weights, *emulated.layer
    rounded, exact = (reference.mega_moe(*call, requantize=r) for r in (True, False))
    assert reference.relative_error(y, exact) <= EXACT_BOUND
    assert reference.relative_error(y, rounded) <= ROUNDED_BOUND
    assert reference.worst_element(y, rounded) <= WORST_BOUND
    return y


@pytest.fixture(
    scope="module", params=[(s, b) for s in SIZES for b in ("decode", "prefill")], ids=str
)
def emulated(request):
    return make(*request.param, max_tokens=300)


@pytest.mark.parametrize("num_tokens", [1, 9, 70, 300])
def test_token_counts(emulated, num_tokens):
    check(emulated, num_tokens, seed=num_tokens)


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_routings(bucket, routing):
    """With one expert for all, prefill's tile takes 12 tokens beyond its own along."""
    check(make("ragged", bucket, 140), 140, routing)


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
@pytest.mark.parametrize("sizes", ["ragged", "whole"])
def test_no_race_and_nothing_undefined(bucket, sizes):
    emulated = make(sizes, bucket, 137, checked=True)
    check(emulated, 90)
    check(emulated, 137, "one_expert")


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
def test_every_seed_gives_the_same_bits(bucket):
    emulated = make("ragged", bucket, 70)
    first = check(emulated, 70)
    tokens = tokens_of(emulated, 70, "unused")
    for seed in (5, 6):
        inputs = fp8.encode_bf16(tokens.x), tokens.topk_ids, tokens.topk_weights
        assert np.array_equal(emulated(*inputs, seed=seed), first)


@pytest.mark.parametrize("hidden, intermediate", [(2064, 144), (144, 2064)])
def test_tiles_in_parts(hidden, intermediate):
    """Few tiles and 33 k-blocks in one of the GEMMs: decode cuts them along k."""
    plan = plans_of_model(MoeProblem(1, hidden, intermediate, 1, 1, "bf16"), GPUS["h200"])["decode"]
    layer = reference.random_layer(1, hidden, intermediate, seed=1, format="bf16")
    tokens = reference.random_tokens(3, hidden, 1, 1, seed=2)
    emulated = EmulatedLayer(plan, layer, max_tokens=3, num_blocks=8)
    x = fp8.encode_bf16(tokens.x)
    y = emulated(x, tokens.topk_ids, tokens.topk_weights)
    call = x, None, tokens.topk_ids, tokens.topk_weights, *layer
    assert reference.relative_error(y, reference.mega_moe(*call, requantize=True)) <= ROUNDED_BOUND


def test_launches_overlap():
    """A launch whose tokens come late, from the one before, is a programmatic dependent all the
    same: what it reads early is weights and ids.
    """
    emulated = make("ragged", "decode", 20)
    assert not emulated.plan.needs_whole_grid(20, x_is_bf16=True)
    old, new = (tokens_of(emulated, 20, "uniform", seed) for seed in (1, 2))
    x = fp8.encode_bf16(new.x)
    late = {"x": x, "topk_ids": new.topk_ids, "topk_weights": new.topk_weights}
    first = Call(fp8.encode_bf16(old.x), old.topk_ids, old.topk_weights)
    for seed in range(4):
        ys = emulated.run_in_stream([first, first._replace(late=late)], seed=seed)
        call = x, None, new.topk_ids, new.topk_weights, *emulated.layer
        ref = reference.mega_moe(*call, requantize=True)
        assert reference.relative_error(ys[1], ref) <= ROUNDED_BOUND


HIDDEN, INTERMEDIATE, EXPERTS = 144, 208, 4
LAYER = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format="bf16")
VARIANTS = [
    {"activation": "swiglu_oai"},
    {"activation": Activation("swiglu_clamped", limit=0.5)},
    {"activation": "geglu_tanh"},
    {"activation": "geglu_erf"},
    {"routed_scaling_factor": -2.5},
    {"apply_router_weight_on_input": True, "routed_scaling_factor": 2.0},
    {"first_expert": 1},
    {"gate_up": "up_first"},
]


@pytest.mark.parametrize("num_tokens", [20, 150])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_through_the_door(variant, num_tokens):
    tokens = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, 2, "unused")
    given = fp8.encode_bf16(tokens.x), tokens.topk_ids, 3 * tokens.topk_weights
    options = dict(variant)
    gate_up = options.pop("gate_up", "gate_first")
    weights = ExpertWeights(LAYER.w13, LAYER.w2, gate_up=gate_up)
    y = mega_moe(*given, weights, backend="emulated", **options)
    call = given[0], None, *given[1:], *LAYER
    exact, rounded = (reference.mega_moe(*call, requantize=r, **variant) for r in (False, True))
    assert reference.relative_error(y, exact) <= EXACT_BOUND
    assert reference.relative_error(y, rounded) <= ROUNDED_BOUND
    assert reference.relative_error(y, reference.mega_moe(*call, requantize=False)) > 1e-2


@pytest.mark.parametrize("num_tokens", [5, 150])
def test_bf16_arrays_and_strided_rows(num_tokens):
    """By ml_dtypes' type: x, weights and y; x and w2 have rows apart, ids 64 bits."""
    tokens = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, 3)
    apart = np.zeros((num_tokens, HIDDEN + 16), ml_dtypes.bfloat16)
    apart[:, :HIDDEN] = tokens.x
    w13, w2 = (part.view(ml_dtypes.bfloat16) for part in (LAYER.w13, LAYER.w2))
    wide = np.zeros((EXPERTS, HIDDEN, INTERMEDIATE + 8), ml_dtypes.bfloat16)
    wide[..., :INTERMEDIATE] = w2
    weights = ExpertWeights(w13, wide[..., :INTERMEDIATE])
    ids, router = tokens.topk_ids.astype(np.int64), tokens.topk_weights.astype(ml_dtypes.bfloat16)
    y = mega_moe(apart[:, :HIDDEN], ids, router, weights, backend="emulated")
    assert y.dtype == ml_dtypes.bfloat16
    call = tokens.x, None, ids, router.astype(np.float32), *LAYER
    ref = reference.mega_moe(*call, requantize=True)
    assert reference.relative_error(y.view(np.uint16), ref) <= ROUNDED_BOUND


def test_sums_as_hardware_has_them_are_not_known():
    emulated = make("ragged", "decode", 5)
    tokens = tokens_of(emulated, 5, "uniform")
    inputs = fp8.encode_bf16(tokens.x), tokens.topk_ids, tokens.topk_weights
    with pytest.raises(EmulationError, match="how an H200 cuts sums of bf16 off is not known"):
        emulated(*inputs, hardware_sums=True)
