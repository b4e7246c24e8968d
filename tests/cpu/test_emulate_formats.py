"""Scales of channels and experts beside biases, interleaved rows and extra tokens, emulated."""

import dataclasses

import numpy as np
import pytest

from jitmoe import ExpertWeights, fp8, mega_moe, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import Variant
from jitmoe.reference_biases import random_biases

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

HIDDEN, INTERMEDIATE, TOP_K = 256, 208, 2
ORDERS = ("gate_first", "up_first", "interleaved")


def random_layer(format, num_experts, halves=False):
    """Scales on either side of what suits the weights, so that biases count and a wrong one
    shows."""
    layer = reference.random_layer(num_experts, HIDDEN, INTERMEDIATE, seed=1, format=format)
    w13_scale = layer.w13_scale[:, :, 0].repeat(2, axis=1) if halves else layer.w13_scale
    factors = np.random.default_rng(2)
    apart = [
        scale * np.exp2(factors.uniform(-1, 1, scale.shape)).astype(np.float32)
        for scale in (w13_scale, layer.w2_scale)
    ]
    return layer._replace(w13_scale=apart[0], w2_scale=apart[1])


def check(y, call, layer, biases=None, **variant):
    """Against the oracle, which without biases and with other orders gives something else."""
    named = {} if biases is None else {"w13_bias": biases.w13, "w2_bias": biases.w2}

    def error(**changes):
        options = variant | named | changes
        ref = reference.mega_moe(call[0], None, *call[1:], *layer, requantize=True, **options)
        return reference.relative_error(y, ref)

    assert error() < 4e-3
    if biases is not None:
        assert error(w13_bias=None) > 0.05 and error(w2_bias=None) > 0.05
    others = [order for order in ORDERS if order != variant.get("gate_up", "gate_first")]
    assert all(error(gate_up=order) > 0.1 for order in others)


@pytest.mark.parametrize("num_tokens", [5, 40, 150])
@pytest.mark.parametrize("gate_up", ORDERS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "format, halves", [("fp8_channel", False), ("fp8_tensor", False), ("fp8_tensor", True)]
)
def test_scales_biases_and_orders(format, halves, has_bias, gate_up, num_tokens):
    layer = random_layer(format, 4, halves)
    biases = random_biases(4, HIDDEN, INTERMEDIATE, seed=3) if has_bias else None
    named = {"w13_bias": biases.w13, "w2_bias": biases.w2} if has_bias else {}
    scales = layer.w13_scale, layer.w2_scale
    weights = ExpertWeights(layer.w13, layer.w2, *scales, **named, gate_up=gate_up)
    assert weights.format == format
    tokens = reference.random_tokens(num_tokens, HIDDEN, 4, TOP_K, 4, "unused")
    call = fp8.encode_bf16(tokens.x), tokens.topk_ids, tokens.topk_weights
    variant = {"activation": "swiglu_oai", "routed_scaling_factor": 2.5}
    y = mega_moe(*call, weights, backend="emulated", **variant)
    check(y, call, layer, biases, gate_up=gate_up, **variant)


@pytest.mark.parametrize("gate_up", ["gate_first", "interleaved"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_extra_tokens(format, has_bias, gate_up):
    """Some expert has from 1 to 16 tokens more than a full tile. Plans with biases take none along
    on a GPU, for want of registers.
    """
    num_tokens, num_experts = 200, 3
    problem = MoeProblem(num_tokens, HIDDEN, INTERMEDIATE, num_experts, TOP_K, format)
    variant = Variant(gate_up=gate_up, has_bias=has_bias)
    plan = choose(problem, GPUS["h200"], **variant.plan_fields)
    assert plan.bucket == "prefill" and plan.extra_tokens == (0 if has_bias else 16)
    plan = dataclasses.replace(plan, extra_tokens=16)
    layer = random_layer(format, num_experts)
    biases = random_biases(num_experts, HIDDEN, INTERMEDIATE, seed=3) if has_bias else None
    tokens = reference.random_tokens(num_tokens, HIDDEN, num_experts, TOP_K, 1)
    counts = np.bincount(tokens.topk_ids.ravel(), minlength=num_experts)
    extra = counts - plan.block_tokens
    assert ((extra > 0) & (extra <= 16)).sum() >= 2
    call = fp8.encode_bf16(tokens.x), tokens.topk_ids, tokens.topk_weights
    emulated = EmulatedLayer(plan, layer, num_tokens, biases=biases)
    y = emulated(*call, variant)
    check(y, call, layer, biases, gate_up=gate_up)
