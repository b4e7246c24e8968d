"""jitmoe.integrations.sglang on a CPU, in a stand-in for SGLang's interface: results, and what is
refused.
"""

import importlib
import importlib.util
import inspect
from dataclasses import fields, is_dataclass, make_dataclass, replace

import pytest

from jitmoe.emulate.compile import NoHostCompiler, compiler

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'jitmoe[torch]'")

import sglang_interface as sglang  # noqa: E402
import stand_in  # noqa: E402
from torch_layer import (  # noqa: E402
    BF16_LAYER,
    BF16_WEIGHTS,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    NO_GATE,
    WEIGHTS,
    error,
    fp8_layer,
    mx_layer,
    no_gate_weights,
    quantized,
    quantized_by_token,
    tokens,
)

from jitmoe import Activation  # noqa: E402
from jitmoe.reference_biases import random_biases  # noqa: E402

try:
    compiler()
except NoHostCompiler as error_:
    pytest.skip(str(error_), allow_module_level=True)

CONFIG = sglang.MoeRunnerConfig(num_experts=EXPERTS, num_local_experts=EXPERTS, top_k=2, layer_id=3)
QUANT = sglang.TritonMoeQuantInfo(
    w13_weight=WEIGHTS[0],
    w2_weight=WEIGHTS[1],
    w13_scale=WEIGHTS[2],
    w2_scale=WEIGHTS[3],
    use_fp8_w8a8=True,
    block_shape=[128, 128],
)


@pytest.fixture
def adapter():
    with stand_in.adapter("sglang", sglang.PLACES) as module:
        sglang.FACTORIES.clear()
        module.register(backend="emulated")
        yield module


def dispatched(given, **changes):
    x, ids, router = given
    topk = sglang.StandardTopKOutput(router, ids, torch.zeros(len(x), EXPERTS))
    return sglang.StandardDispatchOutput(x, None, topk)._replace(**changes)


def run(given, quant_info=QUANT, hooks=None, dispatch=None, **changes):
    backend = sglang.resolve_moe_runner_backend("jitmoe")
    runner = sglang.MoeRunner(backend, replace(CONFIG, **changes))
    assert runner.runner_core.runner_backend == backend
    result = runner.run(dispatch or dispatched(given), quant_info, hooks)
    assert isinstance(result, sglang.StandardCombineInput)
    return result.hidden_states


def refused(call):
    with pytest.raises(NotImplementedError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith('the MoE runner "jitmoe" needs ') and "\n" not in message
    return message


# Results


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
def test_results(adapter, num_tokens):
    """Ids of other ranks' experts are -1; tokens stay as they were, whatever `inplace` allows."""
    given = tokens(num_tokens)
    before = given.x.clone()
    y = run(given)
    assert y.dtype == torch.bfloat16 and error(y, given) < 4e-3
    assert torch.equal(given.x, before) and torch.equal(y, run(given, inplace=False))


def test_quantised_tokens(adapter):
    given = tokens(9)
    codes, scale = quantized(given.x)
    dispatch = dispatched(given, hidden_states=codes, hidden_states_scale=scale)
    assert error(run(given, dispatch=dispatch), given) < 4e-3


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_other_scales(adapter, scales):
    given, (layer, weights) = tokens(20), fp8_layer(scales)
    names = ("w13_weight", "w2_weight", "w13_scale", "w2_scale")
    quant = replace(QUANT, **dict(zip(names, weights, strict=True)), block_shape=None)
    quant = replace(quant, per_channel_quant=scales == "channel")
    assert error(run(given, quant), given, layer) < 4e-3
    codes, scale = x = quantized_by_token(given.x)
    dispatch = dispatched(given, hidden_states=codes, hidden_states_scale=scale)
    assert error(run(given, quant, dispatch=dispatch), given, layer, x=x) < 4e-3


def test_bf16(adapter):
    given, (w13, w2) = tokens(20), BF16_WEIGHTS
    y = run(given, sglang.TritonMoeQuantInfo(w13_weight=w13, w2_weight=w2))
    assert error(y, given, BF16_LAYER) < 4e-3


OAI = {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 1.0, "gate_up_interleaved": False}


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({"activation": "gelu"}, {"activation": "geglu_erf"}),
        ({"swiglu_limit": 0.5}, {"activation": Activation("swiglu_clamped", 1.0, 0.5, 0.0)}),
        (OAI, {"activation": Activation("swiglu_oai", 1.7, 1.0, 1.0)}),
        (OAI | {"gemm1_beta": 1.0}, {"activation": Activation("swiglu_oai", 1.7, 1.0, 1.0)}),
        (
            OAI | {"gate_up_interleaved": True},
            {"activation": Activation("swiglu_oai", 1.7, 1.0, 1.0), "gate_up": "interleaved"},
        ),
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
        ({"num_fused_shared_experts": 1, "gate_up_interleaved": False}, {}),
    ],
    ids=str,
)
def test_configurations(adapter, changes, variant):
    given = tokens(9)
    assert error(run(given, **changes), given, **variant) < 4e-3
    assert not variant or error(run(given, **changes), given) > 1e-2, "the field matters"


@pytest.mark.parametrize("is_oss", [False, True], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("format", ["mxfp4_fp8", "mxfp4_bf16"])
def test_mxfp4(adapter, format, is_oss):
    """Checkpoint tensors; tokens in bf16, or dispatched in e4m3."""
    given, (layer, weights) = tokens(20), mx_layer(format)
    names = ("w13_weight", "w2_weight", "w13_scale", "w2_scale")
    quant = sglang.TritonMoeQuantInfo(**dict(zip(names, weights, strict=True)))
    quant = replace(quant, use_fp8_w8a8=format == "mxfp4_fp8")
    config, variant = {}, {"format": format}
    if is_oss:
        biases = random_biases(EXPERTS, HIDDEN, INTERMEDIATE, seed=3)
        quant = replace(quant, b13=torch.from_numpy(biases.w13), b2=torch.from_numpy(biases.w2))
        config = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
        variant |= {"activation": "swiglu_oai", "gate_up": "interleaved", **biases.arguments}
    assert error(run(given, quant, **config), given, layer, **variant) < 4e-3
    if format == "mxfp4_fp8":
        codes, scale = x = quantized_by_token(given.x)
        dispatch = dispatched(given, hidden_states=codes, hidden_states_scale=scale)
        y = run(given, quant, dispatch=dispatch, **config)
        assert error(y, given, layer, x=x, **variant) < 4e-3


@pytest.mark.parametrize(
    ("activation", "ours"),
    [("relu2", "relu2_no_gate"), ("silu", "silu_no_gate"), ("gelu", "gelu_erf_no_gate")],
)
def test_experts_without_a_gate(adapter, activation, ours):
    given = tokens(9)
    w13, w2, *scales = no_gate_weights(NO_GATE)
    quant = replace(QUANT, w13_weight=w13, w2_weight=w2, w13_scale=scales[0], w2_scale=scales[1])
    config = replace(CONFIG, is_gated=False, activation=activation)
    core = sglang.FACTORIES["jitmoe"](config)
    y = core.run_from_dispatch(dispatched(given), quant, config).hidden_states
    assert error(y, given, NO_GATE, activation=ours) < 4e-3


# Refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "relu2"}, "activation silu or gelu, got relu2"),
        ({"is_gated": False, "activation": "tanh"}, "relu2, silu, gelu without a gate, got tanh"),
        ({"is_gated": False, "swiglu_limit": 7.0}, "swiglu_limit None for silu without a gate"),
        ({"activation": "gelu", "swiglu_limit": 7.0}, "swiglu_limit None for gelu, got 7.0"),
        ({"activation": "gelu", "gemm1_alpha": 1.7}, "gemm1_alpha None for gelu"),
        ({"no_combine": True}, "no_combine False, got True"),
        ({"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit None without gemm1_alpha, got 7.0"),
        ({"gemm1_beta": 1.0}, "gemm1_beta None without gemm1_alpha, got 1.0"),
        (OAI | {"gemm1_clamp_limit": None}, "gemm1_clamp_limit beside gemm1_alpha, got None"),
        (OAI | {"gemm1_beta": 0.5}, "gemm1_beta 1.0, got 0.5"),
        (OAI | {"swiglu_limit": 10.0}, "swiglu_limit None beside gemm1_alpha, got 10.0"),
    ],
    ids=str,
)
def test_layers_are_refused_when_their_runner_is_made(adapter, changes, words):
    config = replace(CONFIG, **changes)
    assert words in refused(lambda: sglang.FACTORIES["jitmoe"](config))
    core = sglang.FACTORIES["jitmoe"](CONFIG)
    assert words in refused(lambda: core.run_from_dispatch(dispatched(tokens(3)), QUANT, config))


def test_a_field_that_is_not_known_is_refused_if_it_is_set(adapter):
    kind = make_dataclass("Later", [("new", int, 0)], bases=(sglang.MoeRunnerConfig,))
    sglang.FACTORIES["jitmoe"](kind())
    assert "new 0, got 3" in refused(lambda: sglang.FACTORIES["jitmoe"](kind(new=3)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_fp8_w8a8": False}, "weights in bfloat16 or MXFP4, got float8_e4m3fn"),
        ({"block_shape": [64, 128]}, "block_shape [128, 128] or None, got [64, 128]"),
        ({"use_int8_w8a8": True}, "use_int8_w8a8 False, got True"),
        ({"w2_zp": torch.ones(1)}, "w2_zp None, got a tensor"),
    ],
    ids=str,
)
def test_quantisations_that_are_refused(adapter, changes, words):
    assert words in refused(lambda: run(tokens(3), replace(QUANT, **changes)))


def test_calls_that_are_refused(adapter):
    given = tokens(3)
    assert "no LoRA hooks, got object" in refused(lambda: run(given, hooks=object()))
    assert "TritonMoeQuantInfo, got MoeQuantInfo" in refused(
        lambda: run(given, sglang.MoeQuantInfo())
    )
    bypassed = dispatched(given, topk_output=sglang.BypassedTopKOutput(torch.zeros(3, EXPERTS)))
    assert "topk_ids, got BypassedTopKOutput" in refused(lambda: run(given, dispatch=bypassed))
    scaled = dispatched(given, hidden_states_scale=torch.ones(3, 2))
    assert "hidden_states_scale None" in refused(lambda: run(given, dispatch=scaled))


def test_register(adapter):
    with pytest.raises(ValueError, match="already registered"):
        adapter.register()
    with pytest.raises(ValueError, match='must be "cuda" or "emulated", got \'triton\''):
        adapter.register(backend="triton")
    sglang.FACTORIES.clear()
    adapter.register()
    with pytest.raises(TypeError, match="w13 must be on a GPU"):
        run(tokens(3))


# The interface


def test_every_field_has_a_place(adapter):
    """Obeyed, descriptive, or refused unless at its default; and no name that is none."""
    names = {field.name for field in fields(sglang.MoeRunnerConfig)}
    known = adapter._OBEYED | adapter._DESCRIPTIVE
    assert not adapter._OBEYED & adapter._DESCRIPTIVE and known - names == {"layer"}
    assert names - known == {"no_combine"}
    assert {field.name for field in fields(sglang.TritonMoeQuantInfo)} >= adapter._WEIGHTS


def test_signatures_are_those_of_the_base_class(adapter):
    base = stand_in.methods(sglang.DispatchMoeRunnerCore)
    own = stand_in.methods(adapter.JitmoeRunnerCore)
    for name in set(base) - {"__init__"}:
        assert stand_in.parameters(own[name]) == stand_in.parameters(base[name]), name
    assert not inspect.isabstract(adapter.JitmoeRunnerCore)


def test_differences_are_found():
    class Other(sglang.DispatchMoeRunnerCore):
        runner_backend = None

        def run_from_dispatch(self, dispatch_output, quant_info, hooks=None): ...

    assert stand_in.differences(sglang.DispatchMoeRunnerCore, sglang.DispatchMoeRunnerCore) == []
    assert stand_in.differences(sglang.DispatchMoeRunnerCore, Other) == [
        "Other has no runner_backend",
        "Other.run_from_dispatch(self, dispatch_output, quant_info, hooks=None)",
    ]


def test_without_sglang():
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed")
    with pytest.raises(ImportError) as caught:
        importlib.import_module("jitmoe.integrations.sglang")
    message = str(caught.value)
    assert (
        message.startswith("jitmoe.integrations.sglang needs SGLang") and "pip install" in message
    )
    assert "\n" not in message


def test_the_stand_in_is_like_sglang():
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    for path, things in sglang.PLACES.items():
        real_module = importlib.import_module(path)
        for thing in things:
            real = getattr(real_module, thing.__name__)
            if is_dataclass(thing):
                assert {f.name for f in fields(thing)} <= {f.name for f in fields(real)}
            elif issubclass(thing, tuple) if inspect.isclass(thing) else False:
                assert thing._fields == real._fields[: len(thing._fields)]
            elif thing is sglang.DispatchMoeRunnerCore:
                assert stand_in.differences(thing, real) == []
            elif inspect.isfunction(thing):
                assert stand_in.parameters(thing) == stand_in.parameters(real)
