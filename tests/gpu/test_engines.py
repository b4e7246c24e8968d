"""The adapters of vLLM and SGLang on a GPU, in stand-ins for the engines' interfaces."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch with CUDA")
if not torch.cuda.is_available():
    pytest.skip(f"PyTorch {torch.__version__} finds no GPU", allow_module_level=True)

import sglang_interface as sglang  # noqa: E402
import stand_in  # noqa: E402
import vllm_interface as vllm  # noqa: E402
from torch_layer import (  # noqa: E402
    BF16_LAYER,
    BF16_WEIGHTS,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYER,
    WEIGHTS,
    error,
    mx_layer,
    quantized,
    quantized_by_token,
    tokens,
)

from jitmoe.reference_biases import random_biases  # noqa: E402

FORMATS = ["fp8_block", "bf16", "mxfp4_fp8", "mxfp4_bf16"]
NAMES = "w13_weight", "w2_weight", "w13_scale", "w2_scale"


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def layer_of(format):
    """(layer, w13, w2, scales), tensors on the GPU."""
    layer, parts = {"fp8_block": (LAYER, WEIGHTS), "bf16": (BF16_LAYER, BF16_WEIGHTS)}.get(
        format
    ) or mx_layer(format)
    w13, w2, *scales = (part.cuda() for part in parts)
    return layer, w13, w2, scales or [None, None]


def check(y, given, layer, format, x=None, **variant):
    """MXFP4's oracle is told of its format; other layers say it themselves."""
    assert y.is_cuda and y.dtype == torch.bfloat16
    variant |= {"format": format} if format.startswith("mxfp4") else {}
    assert error(y.cpu(), given, layer, x=x, **variant) < 1e-2


def gpt_oss(format):
    """Biases, and what the oracle is told of the variant."""
    biases = random_biases(EXPERTS, HIDDEN, INTERMEDIATE, seed=3)
    return biases, {"activation": "swiglu_oai", "gate_up": "interleaved", **biases.arguments}


@pytest.mark.parametrize("num_tokens", [1, 20, 700])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_oss", [False, True], ids=["silu", "gpt-oss"])
def test_vllm(format, num_tokens, is_oss):
    layer, w13, w2, scales = layer_of(format)
    quantisation, variant, activation = {}, {}, vllm.MoEActivation.SILU
    if format == "bf16":
        quantisation = {"block_shape": None}
    elif format.startswith("mxfp4"):
        tokens_in = "fp8" if format == "mxfp4_fp8" else None
        quantisation = {"weight_quant_dtype": "mxfp4", "quant_dtype": tokens_in}
        quantisation |= {"block_shape": None}
    if is_oss:
        biases, variant = gpt_oss(format)
        of_layer = (torch.from_numpy(bias).cuda() for bias in biases)
        quantisation |= dict(zip(("w1_bias", "w2_bias"), of_layer, strict=True))
        activation = vllm.MoEActivation.SWIGLUOAI
    config = replace(vllm.QuantConfig(*scales), **quantisation)
    given = tokens(num_tokens)
    x, ids, router = (part.cuda() for part in given)
    with stand_in.adapter("vllm", vllm.PLACES) as adapter:
        experts = adapter.JitmoeExperts(vllm.MoEConfig(), config)
        y = vllm.run(experts, None, x, w13, w2, router, ids, activation=activation)
    check(y, given, layer, format, **variant)


@pytest.mark.parametrize("num_tokens", [1, 20, 700])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_oss", [False, True], ids=["silu", "gpt-oss"])
def test_sglang(format, num_tokens, is_oss):
    """Tokens in bf16, and as their ranks' quantisation sends them."""
    layer, *weights, scales = layer_of(format)
    quant = sglang.TritonMoeQuantInfo(**dict(zip(NAMES, (*weights, *scales), strict=True)))
    quant = replace(quant, use_fp8_w8a8=format in ("fp8_block", "mxfp4_fp8"))
    if format == "fp8_block":
        quant = replace(quant, block_shape=[128, 128])
    config, variant = {}, {}
    if is_oss:
        biases, variant = gpt_oss(format)
        quant = replace(quant, b13=torch.from_numpy(biases.w13).cuda())
        quant = replace(quant, b2=torch.from_numpy(biases.w2).cuda())
        config = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    shape = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "top_k": 2, "layer_id": 3}
    given = tokens(num_tokens)
    x, ids, router = (part.cuda() for part in given)
    with stand_in.adapter("sglang", sglang.PLACES) as adapter:
        sglang.FACTORIES.clear()
        adapter.register()
        backend = sglang.resolve_moe_runner_backend("jitmoe")
        runner = sglang.MoeRunner(backend, sglang.MoeRunnerConfig(**shape, **config))
        topk = sglang.StandardTopKOutput(router, ids, torch.zeros(num_tokens, EXPERTS).cuda())
        sent = sglang.StandardDispatchOutput(x, None, topk)
        y = runner.run(sent, quant, None).hidden_states
        check(y, given, layer, format, **variant)
        if not quant.use_fp8_w8a8:
            return
        codes = (quantized if format == "fp8_block" else quantized_by_token)(given.x)
        on_gpu = dict(
            zip(
                ("hidden_states", "hidden_states_scale"),
                (part.cuda() for part in codes),
                strict=True,
            )
        )
        y = runner.run(sent._replace(**on_gpu), quant, None).hidden_states
        check(y, given, layer, format, x=codes, **variant)
