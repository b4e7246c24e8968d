"""The plans that every preset ships, at sizes a CPU can run, against the oracle: each routing under
a schedule of its own, and the first of them with races and undefined behaviour looked for.
"""

import dataclasses

import pytest

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.models import MODELS, model_shape
from jitmoe.plan.variant import is_gated
from jitmoe.reference_biases import random_biases

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

NUM_TOKENS = {"decode": 20, "prefill": 60}
NAMES = list(MODELS)
# And as checkpoints with experts in MXFP4 run.
FORMATS = [(name, model.format) for name, model in MODELS.items()] + [
    ("deepseek-v4-flash", "mxfp4_fp8"),
    ("deepseek-v4-pro", "mxfp4_fp8"),
]
KERNELS = [
    pytest.param(name, format, bucket, id=f"{name}-{format}-{bucket}")
    for name, format in FORMATS
    for bucket in NUM_TOKENS
]


def small_plan(model: str, format: str, bucket: str):
    """Stages, registers, unrolling and sorting of the model's own plan; fewer channels and experts,
    with a remainder behind the unrolled loop and in the last tile.
    """
    shape = model_shape(model)
    fields, problem = shape.variant.plan_fields, shape.problem(1, 1, format=format)
    plan = plans_of_model(problem, GPUS["h200"], **fields)[bucket]
    intermediate = 256 if shape.intermediate % 256 == 0 else 128 + shape.intermediate % 128
    sizes = {"hidden": 640, "intermediate": intermediate, "num_experts": max(10, shape.top_k)}
    return dataclasses.replace(plan, **sizes)


@pytest.fixture(scope="module")
def layers():
    """Emulated layers, each built once: presets that differ in size alone share one."""
    made = {}

    def get(plan, checked) -> EmulatedLayer:
        if (plan, checked) not in made:
            sizes = plan.num_experts, plan.hidden, plan.intermediate
            kind = {"format": plan.format, "gated": is_gated(plan.activation)}
            layer = reference.random_layer(*sizes, 0, **kind)
            biases = random_biases(*sizes, 1) if plan.has_bias else None
            num_tokens = NUM_TOKENS[plan.bucket]
            made[plan, checked] = EmulatedLayer(plan, layer, num_tokens, 3, checked, biases=biases)
        return made[plan, checked]

    return get


@pytest.mark.parametrize("model, format, bucket", KERNELS)
def test_every_routing(layers, model, format, bucket):
    plan = small_plan(model, format, bucket)
    for number, routing in enumerate(reference.ROUTINGS):
        check(model, layers(plan, False), routing, seed=NAMES.index(model) + len(NAMES) * number)


@pytest.mark.parametrize("model, format, bucket", KERNELS)
def test_no_race(layers, model, format, bucket):
    number = NAMES.index(model)
    routing = reference.ROUTINGS[number % len(reference.ROUTINGS)]
    check(model, layers(small_plan(model, format, bucket), True), routing, seed=number)


def check(model: str, emulated: EmulatedLayer, routing: str, seed: int) -> None:
    plan, variant = emulated.plan, model_shape(model).variant
    tokens = reference.random_tokens(
        NUM_TOKENS[plan.bucket], plan.hidden, plan.num_experts, plan.top_k, seed, routing
    )
    x = codes = fp8.encode_bf16(tokens.x)
    scale, biases = None, {}
    if plan.quantizes:
        codes, scale = fp8.quantize_tokens(tokens.x)
        x = (codes, scale) if seed % 2 else x
    if plan.has_bias:
        biases = {"w13_bias": emulated.biases.w13, "w2_bias": emulated.biases.w2}
    y = emulated(x, tokens.topk_ids, tokens.topk_weights, variant, seed=seed)
    call = codes, scale, tokens.topk_ids, tokens.topk_weights, *emulated.layer
    options = {"requantize": True, "format": plan.format}
    ref = reference.mega_moe(*call, **options, **variant.formula, **biases)
    assert reference.relative_error(y, ref) < 4e-3
    assert reference.worst_element(y, ref) < 0.06
