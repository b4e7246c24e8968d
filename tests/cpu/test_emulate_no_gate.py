"""Experts without a gate, emulated in both buckets and all formats, against the oracle; and what is
refused.
"""

import numpy as np
import pytest
from parts import with_small_parts

from jitmoe import ExpertWeights, fp8, mega_moe, reference, trace, workspace_bytes
from jitmoe.emulate.compile import NoHostCompiler, build, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.jit.render import render
from jitmoe.plan.formats import FORMATS, format_of
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.memory_map import align
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import Variant
from jitmoe.reference_biases import random_biases

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

# 272 channels: the last tile of GEMM 1 has a group of 16 and lacks the other. 150 tokens are
# prefill: tiles with tokens as rows, and short ones with tokens as columns.
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 272, 2
KINDS = ("relu2_no_gate", "silu_no_gate", "gelu_tanh_no_gate", "gelu_erf_no_gate")
TOKENS = [5, 20, 150]
KERNELS = ["fp8_block", "fp8_channel", "bf16"]  # fp8_tensor has that of channels
WITH_MX = [*KERNELS, "mxfp4_fp8", "mxfp4_bf16"]  # which expand their weights in prefill


def has_f32(scale):
    return scale is not None and scale.dtype == np.float32


class Case:
    """A layer without a gate, its scales far apart, and tokens for it, a third of their slots
    unused.
    """

    def __init__(
        self,
        num_tokens,
        format="fp8_block",
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        has_bias=False,
        routing="unused",
    ):
        intermediate = align(intermediate, format_of(format).intermediate_step)
        sizes = EXPERTS, hidden, intermediate
        layer = reference.random_layer(*sizes, seed=1, format=format, gated=False)
        rng = np.random.default_rng(0)
        apart = [
            s * rng.uniform(0.5, 2, s.shape).astype(np.float32) if has_f32(s) else s
            for s in (layer.w13_scale, layer.w2_scale)
        ]
        self.layer = layer._replace(w13_scale=apart[0], w2_scale=apart[1])
        tokens = reference.random_tokens(num_tokens, hidden, EXPERTS, TOP_K, 2, routing)
        self.given = fp8.encode_bf16(tokens.x), tokens.topk_ids, 3 * tokens.topk_weights
        biases = random_biases(*sizes, seed=3, gated=False) if has_bias else (None, None)
        self.biases = dict(zip(("w13_bias", "w2_bias"), biases, strict=True))
        codes = layer.w13, layer.w2, *apart
        said = {"format": format} if format_of(format).is_mx else {}
        self.weights = ExpertWeights(*codes, **said, **self.biases)
        self.format = format
        assert (self.weights.format, self.weights.gated) == (format, False)

    def oracle(self, **variant):
        x, ids, router = self.given
        return reference.mega_moe(
            *(x, None, ids, router, *self.layer),
            requantize=True,
            format=self.format,
            **self.biases,
            **variant,
        )

    def check(self, batch_invariant=False, **variant):
        y = mega_moe(
            *(*self.given, self.weights),
            batch_invariant=batch_invariant,
            backend="emulated",
            **variant,
        )
        self.compare(y, **variant)
        return y

    def compare(self, y, **variant):
        ref = self.oracle(**variant)
        assert reference.relative_error(y, ref) < 4e-3
        assert reference.worst_element(y, ref) < 0.06

    def plan(self, bucket, kind):
        fields = Variant(kind, **self.weights.variant_fields).plan_fields
        problem = self.weights.problem(len(self.given[0]), TOP_K)
        return plans_of_model(problem, GPUS["h200"], **fields)[bucket]


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    "format, kind",
    [*((format, KINDS[0]) for format in FORMATS), *(("fp8_block", kind) for kind in KINDS[1:])],
)
def test_kinds(kind, format, num_tokens):
    case = Case(num_tokens, format)
    y = case.check(activation=kind, routed_scaling_factor=2.5)
    for other in set(KINDS) - {kind, *KINDS[2:]}:  # two gelus are close
        ref = case.oracle(activation=other, routed_scaling_factor=2.5)
        assert reference.relative_error(y, ref) > 0.05


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("format", WITH_MX)
@pytest.mark.parametrize("intermediate", [16, 128, 208, 384])
def test_ends_of_tiles(intermediate, format, num_tokens):
    """And of hidden inside a tile of GEMM 2 or, in bf16, inside a k-block."""
    hidden = 272 if format == "bf16" else 384
    Case(num_tokens, format, hidden, intermediate).check(activation="relu2_no_gate")


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("format", WITH_MX)
@pytest.mark.parametrize("on_input", [False, True])
def test_biases(on_input, format, num_tokens):
    case = Case(num_tokens, format, has_bias=True)
    case.check(activation="silu_no_gate", apply_router_weight_on_input=on_input)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("format", ["fp8_block", "bf16"])
def test_weights_on_tokens(format, num_tokens):
    case = Case(num_tokens, format)
    variant = {"apply_router_weight_on_input": True, "routed_scaling_factor": 0.5}
    case.check(activation="relu2_no_gate", **variant)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_experts_from_another_on(num_tokens):
    case = Case(num_tokens)
    case.check(activation="relu2_no_gate", first_expert=1)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("format", ["fp8_block", "mxfp4_fp8"])
def test_batch_invariance(format, num_tokens):
    """A token's bits, alone and among others: with 4,096 channels, tiles are else in parts."""
    case = Case(num_tokens, format, hidden=4096, intermediate=272, routing="uniform")
    options = {"activation": "relu2_no_gate", "batch_invariant": True}
    y = case.check(**options)
    alone = [part[:1] for part in case.given]
    plan = case.plan("decode" if num_tokens < 100 else "prefill", "relu2_no_gate")
    assert not plan.batch_invariant
    again = mega_moe(*alone, case.weights, backend="emulated", **options)
    assert np.array_equal(again[0], y[0])


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
@pytest.mark.parametrize("format", WITH_MX)
@pytest.mark.parametrize("num_tokens", [3, 20, 40, 150])
def test_races(num_tokens, format, bucket):
    """Every width of a tile, in the checked build; the workspace is 0xFF before."""
    case = Case(num_tokens, format)
    plan = case.plan(bucket, "relu2_no_gate")
    emulated = EmulatedLayer(plan, case.layer, num_tokens, num_blocks=2, checked=True)
    y = emulated(*case.given, Variant("relu2_no_gate"), seed=num_tokens)
    case.compare(y, activation="relu2_no_gate")


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("format", WITH_MX)
def test_extra_tokens(format, checked):
    """A tile that takes a few more tokens along, as columns beside rows."""
    plan = Case(1, format).plan("prefill", "silu_no_gate")
    num_tokens = plan.tile_tokens - 3
    assert num_tokens > plan.block_tokens
    case = Case(num_tokens, format, routing="one_expert")
    emulated = EmulatedLayer(plan, case.layer, num_tokens, num_blocks=2, checked=checked)
    case.compare(emulated(*case.given, Variant("silu_no_gate")), activation="silu_no_gate")


@pytest.mark.parametrize("format", WITH_MX)
def test_tiles_in_parts(format):
    """Of sums that are joined before the activation, which is not linear."""
    plan = Case(1, format).plan("decode", "relu2_no_gate")
    text = with_small_parts(render(plan, layer="emulated"))
    for num_tokens in (1, 2, 3):
        case = Case(num_tokens, format)
        emulated = EmulatedLayer(plan, case.layer, max_tokens=4, num_blocks=16)
        emulated.executable = build(text, plan.name, checked=False)
        ys = [emulated(*case.given, Variant("relu2_no_gate"), seed=seed) for seed in range(3)]
        case.compare(ys[0], activation="relu2_no_gate")
        assert all((y == ys[0]).all() for y in ys)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_hidden(kind, num_tokens):
    x, ids, router = Case(num_tokens).given
    x[0] = 0x7FC0
    ids[0] = 0, 1
    weights = Case(num_tokens).weights
    y = fp8.decode_bf16(mega_moe(x, ids, router, weights, activation=kind, backend="emulated"))
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


@pytest.mark.parametrize("num_tokens", [20, 150])
@pytest.mark.parametrize(
    "kind, alone",
    [
        ("reglu2", "relu2_no_gate"),
        ("swiglu", "silu_no_gate"),
        ("geglu_tanh", "gelu_tanh_no_gate"),
        ("geglu_erf", "gelu_erf_no_gate"),
    ],
)
def test_up_of_one_is_no_gate(kind, alone, num_tokens):
    """What the kernel of the function with a gate gives where up is 1 for every token."""
    case = Case(num_tokens, "bf16")
    one = fp8.encode_bf16(np.float32(1))
    case.given[0][:, 0] = one
    ups = np.zeros_like(case.layer.w13)
    ups[..., 0] = one
    gated = ExpertWeights(np.concatenate([case.layer.w13, ups], axis=1), case.layer.w2)
    y = mega_moe(*case.given, gated, activation=kind, backend="emulated")
    same = fp8.decode_bf16(case.check(activation=alone))
    assert reference.relative_error(y, same) < 1e-4, "one rounding is another in gelu by erf"


@pytest.mark.parametrize("num_tokens", [20, 150])
@pytest.mark.parametrize("format", ["fp8_block", "mxfp4_fp8"])
def test_traces(format, num_tokens):
    case = Case(num_tokens, format)
    out = np.empty_like(case.given[0])
    options = {"activation": "relu2_no_gate", "backend": "emulated"}
    assert trace(*case.given, case.weights, out=out, **options).summary()
    assert np.array_equal(out, mega_moe(*case.given, case.weights, **options))


def test_strided_weights():
    """Rows and experts apart: views of larger arrays."""
    case = Case(20)
    w13 = np.zeros((EXPERTS, INTERMEDIATE + 3, HIDDEN + 16), np.uint8)
    w13[:, :INTERMEDIATE, :HIDDEN] = case.layer.w13
    view = w13[:, :INTERMEDIATE, :HIDDEN]
    weights = ExpertWeights(view, case.layer.w2, case.layer.w13_scale, case.layer.w2_scale)
    options = {"activation": "relu2_no_gate", "backend": "emulated"}
    y = mega_moe(*case.given, weights, **options)
    assert np.array_equal(y, mega_moe(*case.given, case.weights, **options))


def refusal(call):
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, "one sentence"
    return message


def test_kinds_of_the_other_sort_are_refused():
    case = Case(5)
    message = refusal(lambda: mega_moe(*case.given, case.weights, backend="emulated"))
    assert "w13 has 272 rows for 272 channels of w2: activation must be one of relu2_" in message
    assert message.endswith("got 'swiglu'; take one of experts without a gate")
    layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1)
    gated = ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)
    options = {"activation": "relu2_no_gate", "backend": "emulated"}
    message = refusal(lambda: mega_moe(*case.given, gated, **options))
    assert "w13 has 544 rows for 272 channels of w2: activation must be one of swiglu," in message
    assert message.endswith("got 'relu2_no_gate'; take one of experts with a gate")


@pytest.mark.parametrize("gate_up", ["up_first", "interleaved"])
def test_orders_have_no_meaning(gate_up):
    layer = Case(5).layer
    args = layer.w13, layer.w2, layer.w13_scale, layer.w2_scale
    message = refusal(lambda: ExpertWeights(*args, gate_up=gate_up))
    assert "gate_up must be left at gate_first for experts without a gate, whose" in message
    assert f"got '{gate_up}'; leave it out" in message


def test_scales_of_halves_are_refused():
    layer = Case(5, "fp8_tensor").layer
    halves = np.ones((EXPERTS, 2), np.float32)
    message = refusal(lambda: ExpertWeights(layer.w13, layer.w2, halves, layer.w2_scale))
    assert "w13_scale must have shape [4, 3, 2] (128 x 128 blocks) or [4, 272] (out" in message


def test_biases_of_both_halves_are_refused():
    case = Case(5)
    w13_bias, w2_bias = random_biases(EXPERTS, HIDDEN, INTERMEDIATE, seed=3)
    args = case.layer.w13, case.layer.w2, case.layer.w13_scale, case.layer.w2_scale
    message = refusal(lambda: ExpertWeights(*args, w13_bias=w13_bias, w2_bias=w2_bias))
    assert "w13_bias must have shape [4, 272], got [4, 544]; pass" in message


def test_plans_with_a_gate_are_refused():
    case = Case(5)
    plan = plans_of_model(MoeProblem(5, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), GPUS["h200"])
    options = {"activation": "relu2_no_gate", "plan": plan["decode"], "backend": "emulated"}
    message = refusal(lambda: mega_moe(*case.given, case.weights, **options))
    assert "the plan is for activation 'swiglu', the call has 'relu2_no_gate'; plan ag" in message


def test_weights_say_so():
    weights = Case(5, has_bias=True).weights
    assert repr(weights).endswith("device=host, no gate, biases)")
    assert weights.problem(7, 2).gated is False
    scales = EXPERTS * (3 * 2 + 2 * 3)
    assert weights.num_bytes == EXPERTS * 2 * HIDDEN * INTERMEDIATE + 4 * scales
    layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1)
    gated = ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)
    for num_tokens in TOKENS:
        same = workspace_bytes(gated, num_tokens, TOP_K)
        assert workspace_bytes(weights, num_tokens, TOP_K) == same
