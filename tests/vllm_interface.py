"""What of vLLM 0.33 an adapter meets: names, signatures and contracts, none of its code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import torch


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"


@dataclass
class ParallelConfig:
    use_all2all_kernels: bool = False
    use_fi_nvl_two_sided_kernels: bool = False


@dataclass
class MoEConfig:
    moe_parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    hidden_dim: int = 256
    activation: MoEActivation = MoEActivation.SILU
    is_act_and_mul: bool = True
    is_lora_enabled: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None


@dataclass
class QuantConfig:
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    block_shape: list[int] | None = field(default_factory=lambda: [128, 128])
    per_act_token_quant: bool = False
    per_out_ch_quant: bool = False
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    w1_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    quant_dtype: torch.dtype | str | None = None
    weight_quant_dtype: torch.dtype | str | None = None
    gemm1_clamp_limit: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ): ...


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        if output is None:
            return fused_expert_output
        return output.copy_(fused_expert_output)


def _of_quantisation(name):
    def get(self):
        return getattr(self.quant_config, name)

    return property(get)


class FusedMoEExperts(ABC):
    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
        is_standard = self.activation_format() == FusedMoEActivationFormat.Standard
        if is_standard and (max_num_tokens is not None or num_dispatchers is not None):
            raise ValueError("those are for batched experts")
        self.moe_config, self.quant_config = moe_config, quant_config

    w1_scale, w2_scale = _of_quantisation("w1_scale"), _of_quantisation("w2_scale")
    a1_scale, a2_scale = _of_quantisation("a1_scale"), _of_quantisation("a2_scale")
    w1_bias, w2_bias = _of_quantisation("w1_bias"), _of_quantisation("w2_bias")
    w1_zp, w2_zp = _of_quantisation("w1_zp"), _of_quantisation("w2_zp")
    quant_dtype = _of_quantisation("quant_dtype")
    weight_quant_dtype = _of_quantisation("weight_quant_dtype")
    block_shape = _of_quantisation("block_shape")
    per_act_token_quant = _of_quantisation("per_act_token_quant")
    per_out_ch_quant = _of_quantisation("per_out_ch_quant")

    @staticmethod
    def is_monolithic():
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self):
        return False

    @staticmethod
    @abstractmethod
    def activation_format(): ...

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        tests = {
            "device": cls._supports_current_device(),
            "no act_and_mul": moe_config.is_act_and_mul or cls._supports_no_act_and_mul(),
            "activation": cls._supports_activation(moe_config.activation),
            "quantization": cls._supports_quant_scheme(weight_key, activation_key),
            "parallel": cls._supports_parallel_config(moe_config.moe_parallel_config),
            "hidden": cls._supports_shape(moe_config.hidden_dim),
            "format": activation_format == cls.activation_format(),
            "LoRA": not moe_config.is_lora_enabled or cls.supports_lora(),
        }
        failed = [what for what, is_right in tests.items() if not is_right]
        return not failed, failed[0] if failed else None

    @staticmethod
    @abstractmethod
    def _supports_current_device(): ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul(): ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key, activation_key): ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation): ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config): ...

    @staticmethod
    def _supports_shape(hidden_dim):
        return True

    @staticmethod
    def _supports_batch_invariance():
        return False

    @staticmethod
    def supports_lora():
        return False


class FusedMoEExpertsModular(FusedMoEExperts):
    @staticmethod
    def is_monolithic():
        return False

    def workspace_dtype(self, act_dtype):
        return act_dtype

    @abstractmethod
    def workspace_shapes(
        self,
        M,
        N,
        K,
        topk,
        global_num_experts,
        local_num_experts,
        expert_tokens_meta,
        activation,
    ): ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self): ...

    @abstractmethod
    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ): ...


def run(experts, quantize, x, w1, w2, topk_weights, topk_ids, **options):
    """What vLLM's kernel does around `experts` on one rank: prepare, buffers, apply, finalize.

    options  activation, global_num_experts, expert_map, apply_router_weight_on_input
    """
    on_input = options.get("apply_router_weight_on_input", False)
    activation = options.get("activation", MoEActivation.SILU)
    (num_experts, rows, _), hidden = w1.shape, x.shape[1]
    global_num_experts = options.get("global_num_experts", num_experts)
    a1 = x * topk_weights.to(x.dtype) if on_input else x
    a1q, scale = (a1, None) if experts.expects_unquantized_inputs else quantize(a1)
    sizes = len(x), rows, hidden, topk_ids.shape[1], global_num_experts, num_experts
    shapes = experts.workspace_shapes(*sizes, None, activation)
    dtype = experts.workspace_dtype(x.dtype)
    workspace13, workspace2, out = (
        torch.full(shape, float("nan"), dtype=dtype, device=x.device) for shape in shapes
    )
    result = experts.apply(
        output=out,
        hidden_states=a1q,
        w1=w1,
        w2=w2,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=activation,
        global_num_experts=global_num_experts,
        expert_map=options.get("expert_map"),
        a1q_scale=scale,
        a2_scale=experts.a2_scale,
        workspace13=workspace13,
        workspace2=workspace2,
        expert_tokens_meta=None,
        apply_router_weight_on_input=on_input,
    )
    assert result is None, "what is returned would be an unfinished output"
    y = torch.empty_like(x)
    reduce = experts.finalize_weight_and_reduce_impl()
    reduce.apply(y, out, topk_weights, topk_ids, on_input)
    return y


# Keys of quantisations: of weights, and of tokens.
FP8_BLOCKS, FP8_CHANNEL, FP8_TENSOR = "128 x 128 blocks", "a channel", "a tensor"
MXFP4 = "1 x 32 groups of e2m1"
FP8_TOKENS, FP8_TOKEN, FP8_DYNAMIC_TENSOR = "1 x 128 groups", "a token", "a tensor as it comes"
PLATFORM = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda number: number == 90)
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
PLACES = {
    f"{FUSED_MOE}.modular_kernel": [
        FusedMoEActivationFormat,
        FusedMoEExperts,
        FusedMoEExpertsModular,
        TopKWeightAndReduce,
    ],
    f"{FUSED_MOE}.activation": [MoEActivation],
    f"{FUSED_MOE}.topk_weight_and_reduce": [TopKWeightAndReduceNoOP],
    "vllm.model_executor.layers.quantization.utils.quant_utils": [
        ("kFp8Static128BlockSym", FP8_BLOCKS),
        ("kFp8Dynamic128Sym", FP8_TOKENS),
        ("kFp8StaticChannelSym", FP8_CHANNEL),
        ("kFp8DynamicTokenSym", FP8_TOKEN),
        ("kFp8StaticTensorSym", FP8_TENSOR),
        ("kFp8DynamicTensorSym", FP8_DYNAMIC_TENSOR),
        ("kMxfp4Static", MXFP4),
    ],
    "vllm.platforms": [("current_platform", PLATFORM)],
}
