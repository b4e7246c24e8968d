"""jitmoe.integrations.vllm on a CPU, in a stand-in for vLLM's interface: results, and what is
refused.
"""

import importlib
import importlib.util
import inspect
from dataclasses import replace

import pytest

from jitmoe.emulate.compile import NoHostCompiler, compiler

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'jitmoe[torch]'")

import stand_in  # noqa: E402
import vllm_interface as vllm  # noqa: E402
from torch_layer import (  # noqa: E402
    BF16_LAYER,
    BF16_WEIGHTS,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    NO_GATE,
    NO_GATE_BF16,
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

W1, W2, W1_SCALE, W2_SCALE = WEIGHTS
QUANT = vllm.QuantConfig(W1_SCALE, W2_SCALE)
MOE = vllm.MoEConfig()
SILU, OAI = vllm.MoEActivation.SILU, vllm.MoEActivation.SWIGLUOAI_UNINTERLEAVE


@pytest.fixture
def adapter():
    with stand_in.adapter("vllm", vllm.PLACES) as module:
        yield module


@pytest.fixture
def experts(adapter):
    def make(moe=MOE, **quantisation):
        return adapter.JitmoeExperts(moe, replace(QUANT, **quantisation), backend="emulated")

    return make


def run(experts, given, **options):
    return vllm.run(experts, quantized, given[0], W1, W2, given[2], given[1], **options)


def refused(call):
    with pytest.raises(NotImplementedError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("JitmoeExperts needs ") and "\n" not in message
    return message


# Results


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
def test_results(experts, num_tokens):
    given = tokens(num_tokens)
    y = run(experts(), given)
    assert y.dtype == torch.bfloat16 and error(y, given) < 4e-3


def test_tokens_that_were_dispatched_come_quantised(experts):
    moe = replace(MOE, moe_parallel_config=vllm.ParallelConfig(use_all2all_kernels=True))
    assert experts().expects_unquantized_inputs
    assert not experts(moe).expects_unquantized_inputs
    given = tokens(9)
    assert error(run(experts(moe), given), given) < 4e-3


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_other_scales(experts, scales):
    """Tokens in bf16, and quantised by token where they were dispatched."""
    given, (layer, (w1, w2, *weight_scales)) = tokens(20), fp8_layer(scales)
    quantisation = dict(zip(("w1_scale", "w2_scale"), weight_scales, strict=True))
    quantisation |= {"block_shape": None, "per_out_ch_quant": True, "per_act_token_quant": True}
    args = quantized_by_token, given[0], w1, w2, given[2], given[1]
    y = vllm.run(experts(**quantisation), *args)
    assert error(y, given, layer) < 4e-3
    moe = replace(MOE, moe_parallel_config=vllm.ParallelConfig(use_all2all_kernels=True))
    dispatched = vllm.run(experts(moe, **quantisation), *args)
    assert error(dispatched, given, layer, x=quantized_by_token(given[0])) < 4e-3
    assert not torch.equal(y, dispatched)


def test_bf16(experts):
    given, nothing = tokens(20), dict.fromkeys(("w1_scale", "w2_scale", "block_shape"))
    y = vllm.run(experts(**nothing), None, given[0], *BF16_WEIGHTS, given[2], given[1])
    assert error(y, given, BF16_LAYER) < 4e-3


@pytest.mark.parametrize("tokens_in", [None, "fp8", torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("is_oss", [False, True], ids=["silu", "gpt-oss"])
def test_mxfp4(experts, is_oss, tokens_in):
    """Checkpoint tensors; tokens in bf16, or quantised by token where they were dispatched."""
    format = "mxfp4_bf16" if tokens_in is None else "mxfp4_fp8"
    given, (layer, (w1, w2, *weight_scales)) = tokens(20), mx_layer(format)
    quantisation = dict(zip(("w1_scale", "w2_scale"), weight_scales, strict=True))
    quantisation |= {"weight_quant_dtype": "mxfp4", "quant_dtype": tokens_in, "block_shape": None}
    variant, activation = {"format": format}, SILU
    if is_oss:
        biases = random_biases(EXPERTS, HIDDEN, INTERMEDIATE, seed=3)
        quantisation |= dict(
            zip(("w1_bias", "w2_bias"), map(torch.from_numpy, biases), strict=True)
        )
        variant |= {"activation": "swiglu_oai", "gate_up": "interleaved", **biases.arguments}
        activation = vllm.MoEActivation.SWIGLUOAI
    args = quantized_by_token, given[0], w1, w2, given[2], given[1]
    y = vllm.run(experts(**quantisation), *args, activation=activation)
    assert error(y, given, layer, **variant) < 4e-3
    if tokens_in is not None:
        moe = replace(MOE, moe_parallel_config=vllm.ParallelConfig(use_all2all_kernels=True))
        y = vllm.run(experts(moe, **quantisation), *args, activation=activation)
        assert error(y, given, layer, x=quantized_by_token(given[0]), **variant) < 4e-3


def test_interleaved_rows_and_biases_in_fp8(experts):
    """With gpt-oss's numbers unless others are said."""
    given, biases = tokens(9), random_biases(EXPERTS, HIDDEN, INTERMEDIATE, seed=3)
    quantisation = dict(zip(("w1_bias", "w2_bias"), map(torch.from_numpy, biases), strict=True))
    variant = {"gate_up": "interleaved", **biases.arguments}
    for numbers, ours in [
        ({}, Activation("swiglu_oai")),
        (
            {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 1.0, "gemm1_beta": 0.5},
            Activation("swiglu_clamped", 1.5, 1.0, 0.5),
        ),
    ]:
        own = experts(**quantisation, **numbers)
        y = run(own, given, activation=vllm.MoEActivation.SWIGLUOAI)
        assert error(y, given, activation=ours, **variant) < 4e-3


@pytest.mark.parametrize(
    ("activation", "numbers", "ours"),
    [
        ("GELU", {}, "geglu_erf"),
        ("GELU_TANH", {"gemm1_clamp_limit": 7.0}, "geglu_tanh"),  # vLLM looks at none there
        ("SILU", {"gemm1_clamp_limit": 0.5}, Activation("swiglu_clamped", 1.0, 0.5, 0.0)),
        (
            "SWIGLUOAI_UNINTERLEAVE",
            {"gemm1_clamp_limit": 1.0, "gemm1_alpha": 1.7, "gemm1_beta": 1.0},
            Activation("swiglu_oai", 1.7, 1.0, 1.0),
        ),
        (
            "SWIGLUOAI_UNINTERLEAVE",
            {"gemm1_clamp_limit": 0.5},
            Activation("swiglu_clamped", 1.0, 0.5, 0.0),
        ),
    ],
)
def test_activations(experts, activation, numbers, ours):
    given, activation = tokens(9), vllm.MoEActivation[activation]
    y = run(experts(**numbers), given, activation=activation)
    assert error(y, given, activation=ours) < 4e-3
    of_model = {name.replace("gemm1_clamp", "swiglu"): value for name, value in numbers.items()}
    of_model = {name.replace("gemm1", "swiglu"): value for name, value in of_model.items()}
    assert torch.equal(y, run(experts(replace(MOE, **of_model)), given, activation=activation))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("RELU2_NO_MUL", "relu2_no_gate"),
        ("SILU_NO_MUL", "silu_no_gate"),
        ("GELU_NO_MUL", "gelu_erf_no_gate"),
        ("GELU_TANH_NO_MUL", "gelu_tanh_no_gate"),
    ],
)
def test_experts_without_a_gate(experts, name, ours):
    """In both formats; numbers of a gate mean nothing there."""
    given, options = tokens(9), {"activation": vllm.MoEActivation[name]}
    for layer in (NO_GATE, NO_GATE_BF16):
        w1, w2, *scales = no_gate_weights(layer)
        quantisation = dict(zip(("w1_scale", "w2_scale"), scales or (None, None), strict=True))
        if not scales:
            quantisation["block_shape"] = None
        made = experts(replace(MOE, is_act_and_mul=False, swiglu_limit=0.5), **quantisation)
        y = vllm.run(made, quantized, given[0], w1, w2, given[2], given[1], **options)
        assert error(y, given, layer, activation=ours) < 4e-3
    with pytest.raises(ValueError, match="be one of relu2_no_gate, .* 'swiglu_clamped'; take"):
        vllm.run(made, quantized, given[0], w1, w2, given[2], given[1])


def test_weights_on_the_input_are_there_already(experts):
    x, ids, router = tokens(9)
    given = x, ids[:, :1].contiguous(), router[:, :1].contiguous()
    y = run(experts(), given, apply_router_weight_on_input=True)
    scaled = x * given[2].to(x.dtype)
    assert error(y, (scaled, given[1], torch.ones_like(given[2]))) < 4e-3


# Experts of other ranks

ROW = torch.full((12,), -1, dtype=torch.int32)
ROW[3 : 3 + EXPERTS] = torch.arange(EXPERTS)
MIXED = torch.full((12,), -1, dtype=torch.int32)
MIXED[torch.tensor([7, 0, 4, 11])] = torch.arange(EXPERTS, dtype=torch.int32)


@pytest.mark.parametrize("is_known", [True, False], ids=["read", "never read"])
@pytest.mark.parametrize("expert_map", [ROW, MIXED], ids=["row", "mixed"])
def test_expert_maps(adapter, experts, expert_map, is_known, monkeypatch):
    if not is_known:
        monkeypatch.setattr(adapter, "first_expert_of", lambda *_: None)
    x, _, router = tokens(30)
    ids = torch.randint(-1, 14, router.shape, generator=torch.Generator().manual_seed(1))
    here = [int(expert_map[i]) if 0 <= i < 12 else -1 for i in ids.flatten()]
    here = torch.tensor(here).view(ids.shape)
    assert (here >= 0).any() and (ids == -1).any() and (ids >= 12).any()
    for dtype in (torch.int32, torch.int64):
        given = x, ids.to(dtype), router
        y = run(experts(), given, expert_map=expert_map, global_num_experts=12)
        assert error(y, (x, here, router)) < 4e-3


def test_rows_are_found(adapter):
    first = adapter.first_expert_of
    assert first(ROW, EXPERTS) == 3 and first(MIXED, EXPERTS) is None
    assert first(ROW, EXPERTS - 1) is None, "more experts than there are weights"
    assert first(torch.arange(EXPERTS), EXPERTS) == 0
    assert first(torch.full((12,), -1), EXPERTS) is None
    assert first(torch.tensor([0, 1, 2, 3, 0]), EXPERTS) is None, "two ids of an expert"


def test_maps_are_read_once_and_after_a_write(adapter, monkeypatch):
    expert_map, reads, tolist = ROW.clone(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    assert [adapter.first_expert_of(expert_map, EXPERTS) for _ in range(3)] == [3, 3, 3]
    assert len(reads) == 1
    expert_map.copy_(ROW.roll(2))
    assert adapter.first_expert_of(expert_map, EXPERTS) == 5 and len(reads) == 2
    with torch.inference_mode():
        assert adapter.first_expert_of(ROW.clone(), EXPERTS) is None and len(reads) == 2


# What vLLM asks


def test_what_is_left_to_finalize(adapter, experts):
    reduce = experts().finalize_weight_and_reduce_impl()
    assert isinstance(reduce, vllm.TopKWeightAndReduceNoOP)
    assert experts().workspace_shapes(7, 256, HIDDEN, 2, 8, 4, None, SILU) == (
        (0,),
        (0,),
        (7, HIDDEN),
    )
    assert not adapter.JitmoeExperts.is_monolithic()


KEYS = vllm.FP8_BLOCKS, vllm.FP8_TOKENS
STANDARD, BATCHED = vllm.FusedMoEActivationFormat
RELU2 = vllm.MoEActivation.RELU2_NO_MUL


@pytest.mark.parametrize(
    ("changes", "keys", "form", "reason"),
    [
        ({}, KEYS, STANDARD, None),
        ({"activation": vllm.MoEActivation.GELU}, KEYS, STANDARD, None),
        ({"activation": OAI}, KEYS, STANDARD, None),
        ({"activation": vllm.MoEActivation.SWIGLUOAI}, KEYS, STANDARD, None),
        ({"activation": vllm.MoEActivation.SWIGLUSTEP}, KEYS, STANDARD, "activation"),
        ({"is_act_and_mul": False, "activation": RELU2}, KEYS, STANDARD, None),
        ({"is_act_and_mul": False, "activation": RELU2}, (None, None), STANDARD, None),
        ({"hidden_dim": 2880}, (vllm.MXFP4, None), STANDARD, None),
        ({"hidden_dim": 2888}, KEYS, STANDARD, "hidden"),
        ({"is_lora_enabled": True}, KEYS, STANDARD, "LoRA"),
        ({}, KEYS, BATCHED, "format"),
        ({}, (vllm.FP8_BLOCKS, None), STANDARD, "quantization"),
        ({}, (vllm.FP8_CHANNEL, vllm.FP8_TOKENS), STANDARD, "quantization"),
        ({}, (None, vllm.FP8_TOKEN), STANDARD, "quantization"),
        ({}, (vllm.FP8_CHANNEL, vllm.FP8_TOKEN), STANDARD, None),
        ({}, (vllm.FP8_TENSOR, vllm.FP8_DYNAMIC_TENSOR), STANDARD, None),
        ({}, (vllm.FP8_TENSOR, vllm.FP8_TOKEN), STANDARD, None),
        ({}, (vllm.FP8_TENSOR, vllm.FP8_TENSOR), STANDARD, None),
        ({}, (vllm.FP8_CHANNEL, vllm.FP8_TENSOR), STANDARD, None),
        ({}, (vllm.MXFP4, vllm.FP8_TENSOR), STANDARD, None),
        ({}, (vllm.FP8_BLOCKS, vllm.FP8_TENSOR), STANDARD, "quantization"),
        ({}, (None, None), STANDARD, None),
        ({}, (vllm.MXFP4, vllm.FP8_TOKENS), STANDARD, None),
        ({}, (vllm.MXFP4, vllm.FP8_TOKEN), STANDARD, None),
        ({}, (vllm.MXFP4, vllm.FP8_DYNAMIC_TENSOR), STANDARD, "quantization"),
        ({}, (vllm.MXFP4, "1 x 32 groups"), STANDARD, "quantization"),
        (
            {"moe_parallel_config": vllm.ParallelConfig(use_fi_nvl_two_sided_kernels=True)},
            KEYS,
            STANDARD,
            "parallel",
        ),
    ],
)
def test_capabilities(adapter, changes, keys, form, reason):
    cls = adapter.JitmoeExperts
    got = cls.is_supported_config(cls, replace(MOE, **changes), *keys, form)
    assert got == (reason is None, reason)


def test_only_hopper(adapter, monkeypatch):
    assert adapter.JitmoeExperts._supports_current_device()
    monkeypatch.setattr(vllm.PLATFORM, "is_device_capability", lambda number: number == 100)
    assert not adapter.JitmoeExperts._supports_current_device()
    monkeypatch.setattr(vllm.PLATFORM, "is_cuda", lambda: False)
    assert not adapter.JitmoeExperts._supports_current_device()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"weight_quant_dtype": "mxfp4", "quant_dtype": "mxfp8"},
            "tokens in bfloat16 or FP8 for MXFP4, got mxfp8",
        ),
        ({"w2_zp": torch.zeros(4)}, "no w2_zp, got a tensor"),
        ({"block_shape": [1, 32]}, r"block_shape [128, 128] or None, got [1, 32]"),
        ({"w1_scale": None}, "w1 in bfloat16 or scales of it, got float8_e4m3fn"),
        ({"gemm1_alpha": 1.7}, "silu without gemm1_alpha and gemm1_beta, got 1.7 and 0.0"),
    ],
)
def test_quantisations_that_are_refused(experts, changes, words):
    assert words in refused(lambda: run(experts(**changes), tokens(3)))


def test_calls_that_are_refused(experts):
    given = tokens(3)
    message = refused(lambda: run(experts(), given, activation=vllm.MoEActivation.SWIGLUSTEP))
    assert "an activation of silu, gelu, gelu_tanh, swigluoai, " in message
    assert ", got swiglustep;" in message
    assert "gemm1_clamp_limit" in refused(lambda: run(experts(), given, activation=OAI))
    lora = replace(MOE, is_lora_enabled=True)
    assert "no LoRA" in refused(lambda: run(experts(lora), given))
    batched = given[0][None]
    assert "Standard format, got 3 dimensions" in refused(lambda: experts()._check(batched, W1))


def test_the_cpu_is_used_only_if_asked(adapter):
    with pytest.raises(TypeError, match="w13 must be on a GPU"):
        run(adapter.JitmoeExperts(MOE, QUANT), tokens(3))


# The interface


def test_signatures_are_those_of_the_base_class(adapter):
    base = stand_in.methods(vllm.FusedMoEExperts) | stand_in.methods(vllm.FusedMoEExpertsModular)
    own = stand_in.methods(adapter.JitmoeExperts)
    shared = set(base) & set(own) - {"__init__"}
    assert len(shared) >= 11
    for name in shared:
        assert stand_in.parameters(own[name]) == stand_in.parameters(base[name]), name
    assert not inspect.isabstract(adapter.JitmoeExperts)


def test_without_vllm():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError) as caught:
        importlib.import_module("jitmoe.integrations.vllm")
    message = str(caught.value)
    assert message.startswith("jitmoe.integrations.vllm needs vLLM") and "pip install" in message
    assert "\n" not in message


def test_the_stand_in_is_like_vllm():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    for path, objects in vllm.PLACES.items():
        real = importlib.import_module(path)
        for thing in objects:
            name = thing[0] if isinstance(thing, tuple) else thing.__name__
            assert hasattr(real, name), f"{path}.{name}"
            if inspect.isclass(thing) and not issubclass(thing, vllm.Enum):
                assert stand_in.differences(thing, getattr(real, name)) == []
    activations = importlib.import_module(f"{vllm.FUSED_MOE}.activation").MoEActivation
    assert {kind.value for kind in vllm.MoEActivation} <= {kind.value for kind in activations}
    assert issubclass(
        importlib.import_module("jitmoe.integrations.vllm").JitmoeExperts,
        importlib.import_module(f"{vllm.FUSED_MOE}.modular_kernel").FusedMoEExpertsModular,
    )
