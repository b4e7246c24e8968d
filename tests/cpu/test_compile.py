"""Every shipped plan compiles for sm_90a without spills or performance warnings of ptxas."""

from dataclasses import replace

import pytest

from jitmoe.bench.points import SHAPES
from jitmoe.jit.build import build_many
from jitmoe.plan.formats import format_of
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.models import MODELS, ModelShape
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import is_gated

# Ranks that usually share a model's experts.
USUAL_EP = {
    "deepseek-v3": 8,
    "deepseek-v4-flash": 8,
    "deepseek-v4-pro": 8,
    "glm-4.5": 8,
    "glm-4.5-air": 8,
    "kimi-k2": 16,
    "minimax-m2": 8,
    "gpt-oss-20b": 2,
    "gpt-oss-120b": 8,
    "mixtral-8x7b": 2,
    "nemotron-3-nano-30b-a3b": 2,
    "qwen3-30b-a3b": 4,
    "qwen3-235b-a22b": 8,
    "qwen3-next-80b-a3b": 4,
}
# Intermediate sizes that end inside a scale block, and the corners of what is allowed.
ODD_SHAPES = [
    ModelShape("ragged 192", 1024, 192, 8, 2, "test"),
    ModelShape("ragged 320", 2048, 320, 16, 4, "test"),
    ModelShape("ragged 80", 512, 80, 8, 2, "test"),
    ModelShape("ragged 1040", 4096, 1040, 8, 1, "test"),
    ModelShape("one k-block", 128, 208, 8, 2, "test"),
    ModelShape("smallest", 128, 16, 1, 1, "test"),
    ModelShape("largest", 16_384, 32_768, 1_024, 32, "test"),
]
# Few and many experts and slots, long and short rows; rows that end inside a k-block.
BF16_SHAPES = [
    ModelShape("qwen3 ep 4", 2048, 768, 32, 8, "test"),
    ModelShape("mixtral", 4096, 14_336, 8, 2, "test"),
    ModelShape("gpt-oss", 2880, 2880, 32, 4, "test"),
    ModelShape("ragged rows", 1008, 1840, 40, 19, "test"),
    ModelShape("smallest", 16, 16, 1, 1, "test"),
]
RAGGED = ModelShape("ragged 288", 512, 288, 12, 2, "test")  # a kernel of it spilled without a gate
# Weights in MXFP4: the shapes of the bench, gpt-oss's and the smallest.
MX_SHAPES = {
    (name, format): shape
    for name, shape in (
        SHAPES
        | {
            "gpt-oss": MoeProblem(1, 2880, 2880, 32, 4, "bf16"),
            "smallest": MoeProblem(1, 32, 32, 1, 1, "bf16"),
        }
    ).items()
    for format in ("mxfp4_fp8", "mxfp4_bf16")
}
# And as gpt-oss has them; stamps take registers.
MX_FIELDS = {
    "": {},
    ", biases, by turns": {"has_bias": True, "interleaved": True, "activation": "swiglu_clamped"},
    ", traced": {},
    ", biases, traced": {"has_bias": True},
}
# Experts without a gate: every activation, format, and biases.
NO_GATE = [
    ("relu2_no_gate", "fp8_block", False),
    ("silu_no_gate", "fp8_block", False),
    ("gelu_tanh_no_gate", "fp8_block", True),
    ("gelu_erf_no_gate", "fp8_block", False),
    ("relu2_no_gate", "fp8_channel", False),
    ("gelu_erf_no_gate", "fp8_channel", True),
    ("relu2_no_gate", "bf16", False),
    ("gelu_erf_no_gate", "bf16", True),
    ("relu2_no_gate", "mxfp4_fp8", False),
    ("silu_no_gate", "mxfp4_fp8", True),
    ("gelu_erf_no_gate", "mxfp4_fp8", False),
    ("gelu_erf_no_gate", "mxfp4_bf16", True),
]
# Plan fields of many ranks, each a launch of its own or all in one.
RANKS = {
    "S1": {"num_ranks": 8, "presum": True},
    "S2": {"num_ranks": 8, "local_ranks": 8},
    "S4": {"num_ranks": 4},
}
# What spills with one rank's registers, or loads, and as many slots as there may be.
RANK_SHAPES = [
    (
        ModelShape("ragged 320", 2048, 320, 16, 4, "test"),
        "mxfp4_fp8",
        {"num_ranks": 8, "presum": True},
    ),
    (
        ModelShape("biases", 2048, 768, 16, 4, "test"),
        "fp8_block",
        {"num_ranks": 2, "has_bias": True},
    ),
    (ModelShape("one expert", 2048, 768, 1, 1, "test"), "fp8_block", {"num_ranks": 64}),
    (ModelShape("most slots", 2880, 2880, 32, 32, "test"), "bf16", {"num_ranks": 8}),
]


def plans_with_ranks(gpu):
    """Plan -> what it is for."""
    plans = {}
    for name, fields in RANKS.items():
        for plan in plans_of_model(SHAPES[name], gpu, **fields).values():
            plans[plan] = f"{name} {plan.bucket} of {plan.num_ranks} ranks"
    for shape, format, fields in RANK_SHAPES:
        for plan in plans_of_model(shape.problem(1, format=format), gpu, **fields).values():
            plans[plan] = f"{format} {shape.name} {plan.bucket} of {plan.num_ranks} ranks"
    model = MODELS["gpt-oss-120b"]
    fields = model.variant.plan_fields | {"num_ranks": 8, "presum": True}
    for plan in plans_of_model(model.problem(1, 8), gpu, **fields).values():
        plans[plan] = f"gpt-oss-120b {plan.bucket} of 8 ranks"
    return plans


def shipped_plans():
    """Plan -> what it is for; a plan that two models share is there once."""
    gpu, plans = gpu_spec("h200"), {}
    for name, model in MODELS.items():
        for ep in (1, USUAL_EP[name]):
            fields = model.variant.plan_fields
            for plan in plans_of_model(model.problem(1, ep), gpu, **fields).values():
                plans.setdefault(plan, f"{name} ep {ep} {plan.bucket}")
    for shape in ODD_SHAPES:
        for plan in plans_of_model(shape.problem(1), gpu).values():
            plans.setdefault(plan, f"{shape.name} {plan.bucket}")
    for shape in BF16_SHAPES:
        for plan in plans_of_model(shape.problem(1, format="bf16"), gpu).values():
            plans[plan] = f"bf16 {shape.name} {plan.bucket}"
    in_fp8 = [model for model in MODELS.values() if model.format == "fp8_block"]
    for shape in (*in_fp8, *ODD_SHAPES):
        problem = shape.problem(1, format="fp8_channel")
        kind = {"activation": shape.activation.function}
        for has_bias in {False, shape in ODD_SHAPES}:
            for plan in plans_of_model(problem, gpu, has_bias=has_bias, **kind).values():
                plans[plan] = f"fp8_channel {shape.name} {plan.bucket}{', biases' * has_bias}"
    for (name, format), shape in MX_SHAPES.items():
        for said, fields in MX_FIELDS.items():
            traced = {"trace": "traced" in said}
            for plan in plans_of_model(replace(shape, format=format), gpu, **fields).values():
                plans[replace(plan, **traced)] = f"{format} {name} {plan.bucket}{said}"
    for shape in (ODD_SHAPES[0], BF16_SHAPES[2], RAGGED):
        for kind, format, has_bias in NO_GATE:
            alone, form = replace(shape, activation=kind, has_bias=has_bias), format_of(format)
            if alone.hidden % form.hidden_step or alone.intermediate % form.intermediate_step:
                continue
            fields = alone.variant.plan_fields
            for plan in plans_of_model(alone.problem(1, format=format), gpu, **fields).values():
                name = f"{format} {kind} {shape.name} {plan.bucket}{', biases' * has_bias}"
                plans.setdefault(plan, name)
    # What decode with biases spilled at with the registers of decode without.
    for format in ("fp8_block", "fp8_channel"):
        for kind in ("swiglu", "silu_no_gate"):
            problem = replace(SHAPES["S1"], format=format, gated=is_gated(kind))
            fields = {"has_bias": True, "weight_on_input": kind == "swiglu", "activation": kind}
            for plan in plans_of_model(problem, gpu, **fields).values():
                plans.setdefault(plan, f"{format} S1 {kind} {plan.bucket}, biases as spilled")
    return plans | plans_with_ranks(gpu)


PLANS = shipped_plans()


@pytest.fixture(scope="module")
def outcomes():
    return {outcome.plan: outcome for outcome in build_many(PLANS)}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("plan", PLANS, ids=PLANS.values())
def test_compiles_clean(plan, outcomes):
    outcome = outcomes[plan]
    if outcome.error is not None:
        pytest.fail(str(outcome.error), pytrace=False)
    used = outcome.built.cubin.resources
    used.check(plan)  # once more, in case the build's own check is lost
    assert used.spill_store_bytes == used.spill_load_bytes == 0 and not used.messages
    assert used.static_smem_bytes == 0, "all shared memory is in the plan"
    num_threads = plan.num_threads
    assert used.num_regs <= 65_536 // num_threads // 8 * 8, "one block of the plan fits an SM"
    assert outcome.built.cubin.data[:4] == b"\x7fELF"


def test_every_preset_is_covered():
    assert set(USUAL_EP) == set(MODELS)
    assert {plan.bucket for plan in PLANS} == {"decode", "prefill"}
    assert len({(plan.format, plan.bucket) for plan in PLANS if plan.is_mx}) == 4
