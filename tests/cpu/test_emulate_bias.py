"""Experts with biases, emulated in both buckets, against the oracle; and what is refused."""

import ml_dtypes
import numpy as np
import pytest

from jitmoe import Activation, ExpertWeights, fp8, mega_moe, reference, trace
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import Variant
from jitmoe.reference_biases import Biases, random_biases

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

EXPERTS, TOP_K = 4, 2
TOKENS = [5, 20, 150]  # parts along k where there are many k-blocks, decode, prefill


class Case:
    """A layer with biases and tokens for it, some of their slots unused."""

    def __init__(
        self,
        num_tokens,
        hidden=256,
        intermediate=208,
        dtype="f32",
        gate_up="gate_first",
        format="fp8_block",
    ):
        sizes = EXPERTS, hidden, intermediate
        self.layer = reference.random_layer(*sizes, seed=1, format=format)
        self.biases = random_biases(*sizes, seed=3)
        self.gate_up = gate_up
        tokens = reference.random_tokens(
            num_tokens, hidden, EXPERTS, TOP_K, seed=2, routing="unused"
        )
        self.given = fp8.encode_bf16(tokens.x), tokens.topk_ids, 3 * tokens.topk_weights
        codes, (w13, w2) = self.layer, self.biases
        if dtype == "bf16":
            w13, w2 = w13.astype(ml_dtypes.bfloat16), w2.astype(ml_dtypes.bfloat16)
        self.weights = ExpertWeights(
            codes.w13,
            codes.w2,
            codes.w13_scale,
            codes.w2_scale,
            w13_bias=w13,
            w2_bias=w2,
            gate_up=gate_up,
        )

    def oracle(self, biases=True, **variant):
        x, ids, router = self.given
        if biases:
            variant |= {"w13_bias": self.biases.w13, "w2_bias": self.biases.w2}
        variant |= {"requantize": True, "gate_up": self.gate_up}
        return reference.mega_moe(x, None, ids, router, *self.layer, **variant)

    def check(self, **variant):
        """y, which the oracle gives and not without biases."""
        y = mega_moe(*self.given, self.weights, backend="emulated", **variant)
        ref = self.oracle(**variant)
        assert reference.relative_error(y, ref) < 4e-3
        assert reference.worst_element(y, ref) < 0.25
        assert reference.relative_error(y, self.oracle(biases=False, **variant)) > 0.1
        return y


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", "interleaved"])
@pytest.mark.parametrize("activation", ["swiglu", Activation("swiglu_oai", limit=2.0)], ids=str)
def test_orders_and_activations(num_tokens, gate_up, activation):
    case = Case(num_tokens, gate_up=gate_up)
    case.check(activation=activation, routed_scaling_factor=2.5)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("gate_up", ["gate_first", "interleaved"])
def test_weights_on_tokens_multiply_no_bias(num_tokens, gate_up):
    case = Case(num_tokens, gate_up=gate_up)
    case.check(
        activation="swiglu_oai", apply_router_weight_on_input=True, routed_scaling_factor=0.5
    )


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    "hidden, gate_up, on_input",
    [(256, "gate_first", False), (272, "interleaved", False), (272, "interleaved", True)],
)
def test_weights_in_bf16(num_tokens, hidden, gate_up, on_input):
    """As gpt-oss's, dequantised; `hidden` may end inside a tile."""
    case = Case(num_tokens, hidden, dtype="bf16", gate_up=gate_up, format="bf16")
    case.check(
        activation="swiglu_oai", apply_router_weight_on_input=on_input, routed_scaling_factor=2.5
    )


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("gate_up", ["gate_first", "interleaved"])
def test_bf16_gives_the_bits_of_f32(num_tokens, gate_up):
    y = Case(num_tokens, gate_up=gate_up).check()
    assert np.array_equal(y, Case(num_tokens, dtype="bf16", gate_up=gate_up).check())


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    "hidden, intermediate, gate_up",
    [(128, 16, "interleaved"), (384, 144, "gate_first"), (256, 384, "gate_first")],
)
def test_ends_of_tiles(num_tokens, hidden, intermediate, gate_up):
    """Channels that end inside a tile, and biases that go on there in the next expert's."""
    Case(num_tokens, hidden, intermediate, "bf16", gate_up).check()


@pytest.mark.parametrize(
    "hidden, intermediate, gate_up", [(4096, 208, "gate_first"), (256, 4112, "interleaved")]
)
def test_parts_along_k_add_it_once(hidden, intermediate, gate_up):
    """As few tiles as on a large GPU: 96 blocks share those of one GEMM or the other."""
    case = Case(2, hidden, intermediate, gate_up=gate_up)
    variant = Variant("swiglu_oai", **case.weights.variant_fields)
    problem = MoeProblem(2, hidden, intermediate, EXPERTS, TOP_K)
    plan = plans_of_model(problem, GPUS["h200"], **variant.plan_fields)["decode"]
    emulated = EmulatedLayer(plan, case.layer, 2, num_blocks=96, biases=case.biases)
    y = emulated(*case.given, variant)
    assert reference.relative_error(y, case.oracle(activation="swiglu_oai")) < 4e-3


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
@pytest.mark.parametrize("dtype, gate_up", [("bf16", "gate_first"), ("f32", "interleaved")])
def test_no_races(bucket, dtype, gate_up):
    """In a stream, so that biases are preloaded for a first task that ids then change."""
    case = Case({"decode": 9, "prefill": 70}[bucket], dtype=dtype, gate_up=gate_up)
    x, ids, router = case.given
    variant = Variant("swiglu_oai", **case.weights.variant_fields)
    problem = MoeProblem(len(x), 256, 208, EXPERTS, TOP_K)
    plan = plans_of_model(problem, GPUS["h200"], **variant.plan_fields)[bucket]
    biases = case.biases
    if dtype == "bf16":
        biases = Biases(*map(fp8.encode_bf16, biases))
    emulated = EmulatedLayer(plan, case.layer, len(x), 3, checked=True, biases=biases)
    quantised = fp8.quantize_tokens(fp8.decode_bf16(x))
    early = np.full_like(ids, 3)
    calls = [(quantised, early, router, {"topk_ids": ids}, variant)] * 2
    for y in emulated.run_in_stream(calls, seed=1):
        assert reference.relative_error(y, case.oracle(activation="swiglu_oai")) < 4e-3


@pytest.mark.parametrize("num_tokens", [20, 150])
def test_traces(num_tokens):
    case = Case(num_tokens)
    out = np.empty_like(case.given[0])
    assert trace(*case.given, case.weights, out=out, backend="emulated").summary()
    assert np.array_equal(out, mega_moe(*case.given, case.weights, backend="emulated"))


def arrays(**changes):
    layer = reference.random_layer(EXPERTS, 256, 208, seed=1)
    w13, w2 = random_biases(EXPERTS, 256, 208, seed=3)
    return layer._asdict() | {"w13_bias": w13, "w2_bias": w2} | changes


F64, BF16 = np.zeros((EXPERTS, 416)), np.zeros((EXPERTS, 256), ml_dtypes.bfloat16)
STRIDED = np.zeros((EXPERTS, 418), np.float32)[:, :416]


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"w2_bias": None}, ["w2_bias must be given where the other bias is", "pass zeros"]),
        ({"w13_bias": None}, ["w13_bias must be given where the other bias is", "pass zeros"]),
        ({"w13_bias": F64}, ["w13_bias must have dtype bf16 or u16 or f32, got f64; convert"]),
        ({"w2_bias": BF16}, ["w2_bias must have dtype f32, got bf16; convert"]),
        ({"w13_bias": np.zeros((EXPERTS, 208), "f4")}, ["w13_bias", "[4, 416], got [4, 208]; pas"]),
        ({"w2_bias": np.zeros((256,), "f4")}, ["w2_bias", "[4, 256], got [256]; pass one number"]),
        ({"w13_bias": STRIDED}, ["rows of w13_bias must start at multiples of 16 bytes"]),
    ],
)
def test_refusals(changes, parts):
    with pytest.raises(ValueError) as caught:
        ExpertWeights(**arrays(**changes))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, "one sentence"
    assert all(part in message for part in parts), message


def test_weights_say_so():
    weights = ExpertWeights(**arrays())
    assert weights.has_bias and repr(weights).endswith("device=host, biases)")
    assert not ExpertWeights(**arrays(w13_bias=None, w2_bias=None)).has_bias


def test_plans_without_are_refused():
    case = Case(5)
    plan = plans_of_model(MoeProblem(5, 256, 208, EXPERTS, TOP_K), GPUS["h200"])["decode"]
    with pytest.raises(ValueError, match="the plan is for has_bias False, the call has True; plan"):
        mega_moe(*case.given, case.weights, plan=plan, backend="emulated")
