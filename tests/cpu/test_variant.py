"""Variants of the layer: what names them, what they change of plan and parameters, the oracle."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jitmoe import Activation, fp8, reference
from jitmoe.jit.render import render
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose, plans_of_model
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT, FUNCTIONS, KINDS, Variant
from jitmoe.reference_activations import activate

H200 = GPUS["h200"]
PROBLEM = MoeProblem(8, 512, 192, 4, 2)


def test_usual_numbers():
    assert Activation() == Activation.of("swiglu") == Activation("swiglu")
    clamped, oai = Activation("swiglu_clamped"), Activation("swiglu_oai")
    assert (clamped.alpha, clamped.limit, clamped.up_offset) == (1.0, 10.0, 0.0)
    assert (oai.alpha, oai.limit, oai.up_offset) == (1.702, 7.0, 1.0)
    assert Activation("swiglu_oai", limit=np.float32(3)).limit == 3.0
    assert Activation.of(oai) is oai and hash(oai) == hash(Activation("swiglu_oai"))
    assert {Activation(kind).function for kind in KINDS} == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("relu",), ValueError, "activation must be one of swiglu, .*, got 'relu'; take the one"),
        ((None,), ValueError, "activation must be one of swiglu, .*, got None; take"),
        (("swiglu", 2.0), ValueError, "alpha must be None for swiglu, .*, got 2.0; take swiglu_"),
        (("geglu_erf", None, 7), ValueError, "limit must be None for geglu_erf, .*, got 7; take"),
        (("swiglu_clamped", None, 0), ValueError, "limit must be positive, got 0; pass the"),
        (("swiglu_clamped", None, -7.0), ValueError, "limit must be positive, got -7; pass"),
        (("swiglu_clamped", None, 1e38), ValueError, "limit must .* to 1e.30 or inf, got 1e.38; "),
        (("swiglu_oai", math.inf), ValueError, "alpha must be from -1e.30 to 1e.30, got inf; ta"),
        (("swiglu_oai", 1, 1, -math.inf), ValueError, "up_offset must be from .*, got -inf; take"),
        (("swiglu_oai", math.nan), ValueError, "alpha must be from .*, got nan; take that of"),
        (("swiglu_oai", "2"), TypeError, "alpha must be a number, got str; pass a float"),
        (("swiglu_oai", True), TypeError, "alpha must be a number, got bool; pass a float"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        Activation(*arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300, "one sentence"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"activation": "gelu"}, ValueError, "activation must be one of swiglu, .*, got 'gelu'"),
        ({"gate_up": "up"}, ValueError, "gate_up must be one of gate_first, .*, got 'up'; say"),
        ({"routed_scaling_factor": math.inf}, ValueError, "routed_scaling_factor must .* got inf"),
        ({"routed_scaling_factor": None}, TypeError, "must be a number, got NoneType; pass a flo"),
        ({"first_expert": -1}, ValueError, "first_expert must be an integer .*, got -1; pass"),
        ({"first_expert": 2**30 + 1}, ValueError, "from 0 to 1,073,741,824, got 1073741825; "),
        ({"first_expert": 1.0}, ValueError, "first_expert must be an integer .*, got 1.0; pass"),
        ({"first_expert": True}, ValueError, "first_expert must be an integer .*, got True; pa"),
        ({"apply_router_weight_on_input": 1}, TypeError, "must be True or False, got 1; pass a b"),
        ({"batch_invariant": None}, TypeError, "batch_invariant must be True or False, got None; "),
    ],
)
def test_variants_refuse(arguments, error, message):
    with pytest.raises(error, match=message):
        Variant(**arguments)


def test_numbers_need_no_other_kernel():
    plans = {
        choose(PROBLEM, H200, **Variant(Activation.of(activation)).plan_fields)
        for activation in ("swiglu_clamped", "swiglu_oai", Activation("swiglu_oai", limit=3))
    }
    assert len(plans) == 1
    assert choose(PROBLEM, H200, **DEFAULT.plan_fields) == choose(PROBLEM, H200)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_plan_and_text_name_the_activation(function):
    problem = replace(PROBLEM, gated=not function.endswith("_no_gate"))
    for plan in plans_of_model(problem, H200, activation=function).values():
        assert plan.activation == function
        text = render(plan)
        assert f"constexpr u32 kActivation = {list(FUNCTIONS).index(function)};" in text
        assert f"GEMMs, {FUNCTIONS[function]}, re-quantise" in text


def test_plan_refuses_other_functions():
    with pytest.raises(PlanError, match="must be one of swiglu, .*, got 'swiglu_oai'; take Act"):
        replace(choose(PROBLEM, H200), activation="swiglu_oai").check(H200)
    with pytest.raises(PlanError, match="activation of a plan must be one of .*, got 'silu'"):
        choose(PROBLEM, H200, activation="silu")


def test_experts_without_a_gate():
    """Kinds that take no gate are the functions that end so, and refuse an order of halves."""
    assert [kind for kind in KINDS if not Activation(kind).gated] == [
        *("relu2_no_gate", "silu_no_gate", "gelu_tanh_no_gate", "gelu_erf_no_gate")
    ]
    for gate_up in ("up_first", "interleaved"):
        with pytest.raises(ValueError, match=f"without a gate, whose .*, got '{gate_up}'; leave"):
            Variant("relu2_no_gate", gate_up=gate_up)
    problem = replace(PROBLEM, gated=False)
    plan = choose(problem, H200, **Variant("relu2_no_gate").plan_fields)
    for field in ("up_first", "interleaved"):
        with pytest.raises(PlanError, match="gate_up must be left at gate_first for experts with"):
            replace(plan, **{field: True}).check(H200)
    with pytest.raises(PlanError, match="swiglu is of experts with a gate, the .* gated False; "):
        choose(problem, H200)
    with pytest.raises(PlanError, match="relu2_no_gate is of experts without a gate, .* True; "):
        choose(PROBLEM, H200, activation="relu2_no_gate")


def test_scalars_are_the_last_parameters():
    assert DEFAULT.scalars("fp8_block")["mid_scale_unit"] == 1 / 448
    scalars = DEFAULT.scalars("bf16")
    assert scalars["mid_scale_unit"] == 1.0
    assert list(scalars) == [p.name for p in choose(PROBLEM, H200).params[-len(scalars) :]]


GATES, UPS = np.array([-12.0, -1.0, 0.5, 3.0, 12.0]), np.array([2.0, -15.0, 15.0, 0.25, -0.5])


def by_hand(function):
    return [function(g, u) for g, u in zip(GATES.tolist(), UPS.tolist(), strict=True)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def clip(x, low, high):
    return max(low, min(x, high))


def swiglu_oai(g, u):
    return min(g, 7) * sigmoid(1.702 * min(g, 7)) * (clip(u, -7, 7) + 1)


def gelu_tanh(x):
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


FORMULAS = {
    "swiglu": lambda g, u: g * sigmoid(g) * u,
    "swiglu_clamped": lambda g, u: min(g, 10) * sigmoid(min(g, 10)) * clip(u, -10, 10),
    "swiglu_oai": swiglu_oai,
    "geglu_tanh": lambda g, u: gelu_tanh(g) * u,
    "geglu_erf": lambda g, u: g * math.erfc(-g / math.sqrt(2)) / 2 * u,
    "reglu2": lambda g, u: (g * g if g > 0 else 0) * u,
    "relu2_no_gate": lambda x, _: x * x if x > 0 else 0,
    "silu_no_gate": lambda x, _: x * sigmoid(x),
    "gelu_tanh_no_gate": lambda x, _: gelu_tanh(x),
    "gelu_erf_no_gate": lambda x, _: x * math.erfc(-x / math.sqrt(2)) / 2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_by_hand(kind):
    ups = UPS if Activation(kind).gated else None
    assert np.allclose(activate(GATES, ups, kind), by_hand(FORMULAS[kind]), rtol=1e-14, atol=1e-14)


def random_call(top_k=2):
    layer = reference.random_layer(3, 256, 192, seed=1)
    tokens = reference.random_tokens(8, 256, 3, top_k, seed=2, routing="duplicates")
    return [*fp8.quantize_tokens(tokens.x), *tokens[1:]], layer


def test_oracle_scales_the_sum():
    call, layer = random_call()
    y = reference.mega_moe(*call, *layer, requantize=False)
    scaled = reference.mega_moe(*call, *layer, requantize=False, routed_scaling_factor=-2.5)
    assert np.allclose(scaled, -2.5 * y, rtol=1e-14)
    half, whole = (
        reference.mega_moe(*call, *layer, requantize=True, routed_scaling_factor=factor)
        for factor in (0.5, 1.0)
    )
    assert np.array_equal(half, whole / 2)


@pytest.mark.parametrize("requantize", [False, True])
def test_oracle_weighs_tokens(requantize):
    """With one slot, as if the scales of x had the weight already and the router said 1."""
    (x, scale, ids, weights), layer = random_call(top_k=1)
    weights = weights * np.float32([2, -0.5, 4, 1, 0.25, 8, 2, 2])[:, None]
    options = {"requantize": requantize}
    y = reference.mega_moe(
        x, scale, ids, weights, *layer, **options, apply_router_weight_on_input=True
    )
    ones = np.ones_like(weights)
    assert np.array_equal(y, reference.mega_moe(x, scale * weights, ids, ones, *layer, **options))
    plain = reference.mega_moe(x, scale, ids, weights, *layer, **options)
    assert reference.relative_error(y, plain) > 0.1


def test_oracle_knows_global_ids():
    (x, scale, ids, weights), layer = random_call()
    ids[0] = -1, 3
    y = reference.mega_moe(x, scale, ids, weights, *layer, requantize=True)
    moved = reference.mega_moe(
        x, scale, ids + 96, weights, *layer, requantize=True, first_expert=96
    )
    assert y.any() and not y[0].any() and np.array_equal(y, moved)


def test_oracle_takes_other_numbers():
    activation = Activation("swiglu_oai", alpha=0.5, limit=2.0, up_offset=-3.0)
    wanted = by_hand(lambda g, u: min(g, 2) * sigmoid(min(g, 2) / 2) * (clip(u, -2, 2) - 3))
    assert np.allclose(activate(GATES, UPS, activation), wanted, rtol=1e-14)
    plain = Activation("swiglu_clamped", limit=math.inf)
    assert np.array_equal(activate(GATES, UPS, plain), activate(GATES, UPS))
