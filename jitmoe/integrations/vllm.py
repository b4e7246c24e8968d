"""The layer as experts of vLLM's modular kernels: `JitmoeExperts`."""

from __future__ import annotations

import torch

try:
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8Dynamic128Sym,
        kFp8DynamicTensorSym,
        kFp8DynamicTokenSym,
        kFp8Static128BlockSym,
        kFp8StaticChannelSym,
        kFp8StaticTensorSym,
        kMxfp4Static,
    )
    from vllm.platforms import current_platform
except ImportError as error:
    raise ImportError(
        f"jitmoe.integrations.vllm needs vLLM with the modular kernels of 0.33 ({error}); "
        "pip install 'vllm>=0.33'"
    ) from error

from jitmoe import Activation, MoeProblem
from jitmoe.integrations.expert_maps import first_expert_of, ids_here
from jitmoe.integrations.static_scales import check_static, x_scale_of
from jitmoe.integrations.torch import mega_moe

BLOCK = [128, 128]

# Of weights and of tokens; without any they are in bf16. What lies between the GEMMs is always
# quantised per token and 128 channels, finer than any of them (static_scales.py).
QUANTISATIONS = (
    (None, None),
    (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    (kFp8StaticChannelSym, kFp8StaticTensorSym),
    (kFp8StaticTensorSym, kFp8DynamicTokenSym),
    (kFp8StaticTensorSym, kFp8DynamicTensorSym),
    (kFp8StaticTensorSym, kFp8StaticTensorSym),
    (kMxfp4Static, None),
    (kMxfp4Static, kFp8Dynamic128Sym),
    (kMxfp4Static, kFp8DynamicTokenSym),
    (kMxfp4Static, kFp8StaticTensorSym),
)
# Formats of weights in MXFP4, by what vLLM calls the type of tokens.
MXFP4 = {None: "mxfp4_bf16", "fp8": "mxfp4_fp8", torch.float8_e4m3fn: "mxfp4_fp8"}

# vLLM's activations and our kinds; of "swigluoai" rows of gate and up come by turns. Those that end
# in "no_mul" are of experts without a gate.
INTERLEAVED = "swigluoai"
KINDS = {
    "silu": "swiglu",
    "gelu": "geglu_erf",
    "gelu_tanh": "geglu_tanh",
    INTERLEAVED: "swiglu_oai",
    "swigluoai_uninterleave": "swiglu_oai",
    "silu_no_mul": "silu_no_gate",
    "gelu_no_mul": "gelu_erf_no_gate",
    "gelu_tanh_no_mul": "gelu_tanh_no_gate",
    "relu2_no_mul": "relu2_no_gate",
}
# What of a quantisation must not be set, as the base class names it.
_UNSUPPORTED = ("w1_zp", "w2_zp")


class JitmoeExperts(modular_kernel.FusedMoEExpertsModular):
    """Experts in FP8, MXFP4 or bf16 in one launch: both GEMMs, router weights, sum over slots.

    moe_config, quant_config  of vLLM; weights are used in place, and so are scales but those of
                              MXFP4, of which a copy in the kernel's order is kept
    backend                   as in `jitmoe.integrations.torch.mega_moe`

    Pair it with a prepare and finalize step in vLLM's `FusedMoEKernel`. What there is no kernel for
    is refused by the capability tests, and by `apply`: NotImplementedError, one sentence.
    """

    def __init__(
        self,
        moe_config,
        quant_config,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
        *,
        backend: str = "cuda",
    ):
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.backend = backend

    # What is supported

    @staticmethod
    def activation_format():
        return modular_kernel.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda() and current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) in QUANTISATIONS

    @staticmethod
    def _supports_activation(activation) -> bool:
        return activation.value in KINDS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        """All but the dispatchers that lay scales out in their own way."""
        return not any(
            getattr(moe_parallel_config, f"use_fi_nvl_{sides}_sided_kernels", False)
            for sides in ("one", "two")
        )

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        """In bf16, which takes all that others take; `apply` raises ValueError for the rest."""
        try:
            MoeProblem(1, hidden_dim, 128, 1, 1, "bf16")
        except ValueError:
            return False
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        """Bits are the same for the same batch; another batch may be summed in another order."""
        return False

    @staticmethod
    def supports_lora() -> bool:
        return False

    # What a modular kernel asks

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Tokens in bf16, which the kernel quantises itself, unless they travel: e4m3 is half as
        much to send. In bf16 even then if each expert has a static scale of its own.
        """
        has_many = self.a1_scale is not None and self.a1_scale.numel() > 1
        return has_many or not self.moe_config.moe_parallel_config.use_all2all_kernels

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta,
        activation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces of vLLM's: jitmoe keeps one for each stream. Then the output's shape."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self):
        """Nothing is left to do: y is weighted and summed."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write y into `output`.

        output         [num_tokens, hidden] bf16
        hidden_states  [num_tokens, hidden] bf16, or e4m3 with a1q_scale f32 [num_tokens, hidden /
                       128], [num_tokens, 1] or of one element, as a static a1_scale
        w1, w2         [num_experts, 2 * intermediate, hidden], gate rows first, or by turns for
                       swigluoai, and [num_experts, hidden, intermediate], e4m3 with the scales of
                       quant_config, or bf16; w1 of experts without a gate [num_experts,
                       intermediate, hidden]. In MXFP4 as in checkpoints, uint8 of half as many
                       columns, with scales for 32 of a row
        expert_map     int32 [global_num_experts], the number here of every expert, -1 for those of
                       other ranks; None if ids count the experts here. One of experts in a row is
                       read once, and again after a write; it must not change under a CUDA graph
        apply_router_weight_on_input
                       whether the prepare step has multiplied tokens by their weights already

        The rest is of no use here: a2_scale, static, is finer by the kernel's own quantisation, and
        only checked, as a1_scale is of tokens in bf16. ValueError unless they are positive, finite,
        and one number or one for each expert.
        """
        self._check(hidden_states, w1)
        check_static({"a1_scale": self.a1_scale, "a2_scale": a2_scale}, w1.shape[0])
        if a1q_scale is self.a1_scale and hidden_states.dtype == torch.bfloat16:
            a1q_scale = None  # was handed through, as it is for MXFP4
        first_expert = 0
        if expert_map is not None:
            first = first_expert_of(expert_map, w1.shape[0])
            if first is None:
                topk_ids = ids_here(topk_ids, expert_map)
            else:
                first_expert = first
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        mega_moe(
            hidden_states,
            topk_ids.contiguous(),
            topk_weights.contiguous(),
            w1,
            w2,
            self.w1_scale,
            self.w2_scale,
            x_scale=x_scale_of(a1q_scale),
            w13_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            activation=self._activation(activation),
            gate_up="interleaved" if activation.value == INTERLEAVED else "gate_first",
            format=self._format(),
            first_expert=first_expert,
            out=output,
            backend=self.backend,
        )

    def _check(self, hidden_states: torch.Tensor, w1: torch.Tensor) -> None:
        """Raise NotImplementedError unless the kernel computes these experts."""
        for name in _UNSUPPORTED:
            got = getattr(self, name)
            if got is not None and got is not False:
                _refuse(f"no {name}", "a tensor" if isinstance(got, torch.Tensor) else got)
        if self.block_shape is not None and list(self.block_shape) != BLOCK:
            _refuse(f"block_shape {BLOCK} or None", self.block_shape)
        if self.w1_scale is None and w1.dtype != torch.bfloat16:
            _refuse("w1 in bfloat16 or scales of it", f"{str(w1.dtype).removeprefix('torch.')}")
        if getattr(self.moe_config, "is_lora_enabled", False):
            _refuse("no LoRA", "is_lora_enabled")
        if hidden_states.dim() != 2:
            _refuse("tokens in the Standard format", f"{hidden_states.dim()} dimensions")

    def _format(self) -> str | None:
        """Where it is not to be found by dtypes."""
        if self.weight_quant_dtype != "mxfp4":
            return None
        if self.quant_dtype not in MXFP4:
            _refuse("tokens in bfloat16 or FP8 for MXFP4", self.quant_dtype)
        return MXFP4[self.quant_dtype]

    def _activation(self, activation) -> Activation | str:
        name = activation.value
        if name not in KINDS:
            _refuse(f"an activation of {', '.join(KINDS)}", name)
        limit = self._number("gemm1_clamp_limit", "swiglu_limit")
        alpha = self._number("gemm1_alpha", "swiglu_alpha")
        beta = self._number("gemm1_beta", "swiglu_beta")
        if name == INTERLEAVED:  # numbers are those of gpt-oss unless they are said
            limit = 7.0 if limit is None else limit
            alpha, beta = 1.702 if alpha is None else alpha, 1.0 if beta is None else beta
        alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
        if name == "silu" and (alpha, beta) != (1.0, 0.0):
            _refuse("silu without gemm1_alpha and gemm1_beta", f"{alpha} and {beta}")
        if name == "swigluoai_uninterleave" and limit is None:
            _refuse("gemm1_clamp_limit for swigluoai_uninterleave", None)
        if name.startswith("gelu") or name.endswith("_no_mul") or limit is None:
            return KINDS[name]
        return Activation("swiglu_clamped", alpha, limit, beta)

    def _number(self, of_quantisation: str, of_model: str) -> float | None:
        """As vLLM looks it up: the quantisation's, else the model's."""
        number = getattr(self.quant_config, of_quantisation, None)
        return getattr(self.moe_config, of_model, None) if number is None else number


def _refuse(allowed: str, got) -> None:
    raise NotImplementedError(
        f"JitmoeExperts needs {allowed}, got {got}; choose another --moe-backend"
    )
