"""The layer as a MoE runner of SGLang: `register()`, then the runner backend "jitmoe"."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial

import torch

try:
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
except ImportError as error:
    raise ImportError(
        f"jitmoe.integrations.sglang needs SGLang with the runner registry of 0.5.23 ({error}); "
        "pip install 'sglang>=0.5.23'"
    ) from error

from jitmoe import Activation
from jitmoe.integrations.static_scales import check_static, x_scale_of
from jitmoe.integrations.torch import mega_moe

NAME = "jitmoe"
BLOCK = [128, 128]

# Its activations of experts without a gate, and our kinds.
NO_GATE = {"relu2": "relu2_no_gate", "silu": "silu_no_gate", "gelu": "gelu_erf_no_gate"}

# Fields of MoeRunnerConfig that are obeyed here, and those that only describe the layer: ids and
# weights of fused shared experts are in the call, and `inplace` allows what is not done. Every
# other field must be at its default.
_OBEYED = {
    "activation",
    "apply_router_weight_on_input",
    "gate_up_interleaved",
    "gemm1_alpha",
    "gemm1_beta",
    "gemm1_clamp_limit",
    "is_gated",
    "routed_scaling_factor",
    "swiglu_limit",
}
_DESCRIPTIVE = {
    "hidden_size",
    "inplace",
    "intermediate_size_per_partition",
    "layer",
    "layer_id",
    "num_experts",
    "num_fused_shared_experts",
    "num_local_experts",
    "params_dtype",
    "routing_method_type",
    "top_k",
}
# Those of TritonMoeQuantInfo that are.
_WEIGHTS = {
    *("w13_weight", "w2_weight", "w13_scale", "w2_scale", "a13_scale", "a2_scale"),
    *("b13", "b2", "use_fp8_w8a8", "block_shape", "per_channel_quant"),
}
# Two e2m1 codes each, in MXFP4.
_FP4 = (torch.uint8, torch.int8, getattr(torch, "float4_e2m1fn_x2", None))


def register(backend: str = "cuda") -> None:
    """Make "jitmoe" a name of SGLang's runner backends.

    backend  as in `jitmoe.integrations.torch.mega_moe`

    Raises ValueError for another backend, and SGLang's if the name is registered already.
    """
    if backend not in ("cuda", "emulated"):
        raise ValueError(f'backend must be "cuda" or "emulated", got {backend!r}')
    register_moe_runner_core(NAME, partial(JitmoeRunnerCore, backend=backend))


class JitmoeRunnerCore(DispatchMoeRunnerCore):
    """Experts in FP8, MXFP4 or bf16 in one launch: both GEMMs, router weights, sum over slots.

    config  MoeRunnerConfig, each field of which is obeyed or refused by name: NotImplementedError,
            one sentence
    """

    def __init__(self, config, backend: str = "cuda"):
        super().__init__(config)
        self.backend = backend
        _check_config(config)

    @property
    def runner_backend(self):
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None):
        """The experts of tokens in the standard format -> StandardCombineInput of y.

        dispatch_output  hidden_states [num_tokens, hidden] bf16, or e4m3 with hidden_states_scale
                         f32 [num_tokens, hidden / 128], [num_tokens, 1] or of one element;
                         topk_output with topk_weights and topk_ids [num_tokens, top_k], -1 for
                         experts that are not here
        quant_info       TritonMoeQuantInfo of weights used in place: in FP8 with scales of 128 x
                         128 blocks, of channels or of experts, or in bf16; or in MXFP4 as in
                         checkpoints, uint8 with scales in e8m0 for 32 of a row, multiplied by bf16
                         tokens, or with use_fp8_w8a8 by e4m3 ones. a13_scale and a2_scale, static,
                         are checked and not applied: the kernel quantises finer
        runner_config    MoeRunnerConfig; routed_scaling_factor multiplies y

        y is bf16 and always new memory. Raises NotImplementedError for what there is no kernel for,
        what `jitmoe.integrations.torch.mega_moe` raises, and ValueError for a static scale that is
        not positive, finite, and one number or one for each expert.
        """
        if runner_config is not self.config:
            _check_config(runner_config)
        if hooks is not None:
            _refuse("no LoRA hooks", type(hooks).__name__)
        _check_weights(quant_info)
        x, scale, topk = _tokens(dispatch_output)
        factor = runner_config.routed_scaling_factor
        y = mega_moe(
            x,
            topk.topk_ids.contiguous(),
            topk.topk_weights.contiguous(),
            quant_info.w13_weight,
            quant_info.w2_weight,
            quant_info.w13_scale,
            quant_info.w2_scale,
            x_scale=x_scale_of(scale),
            w13_bias=quant_info.b13,
            w2_bias=quant_info.b2,
            activation=_activation(runner_config),
            gate_up="interleaved" if _is_interleaved(runner_config) else "gate_first",
            format=_format(quant_info),
            routed_scaling_factor=1.0 if factor is None else factor,
            apply_router_weight_on_input=runner_config.apply_router_weight_on_input,
            backend=self.backend,
        )
        return StandardCombineInput(hidden_states=y)


def _check_config(config) -> None:
    """Raise NotImplementedError for a layer that there is no kernel for."""
    _check_defaults(config, _OBEYED | _DESCRIPTIVE)
    _activation(config)


def _activation(config) -> Activation | str:
    """What SGLang's Triton runner computes between the GEMMs."""
    alpha, clamp, limit = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    beta = getattr(config, "gemm1_beta", None)
    if not config.is_gated and config.activation not in NO_GATE:
        _refuse(f"activation {', '.join(NO_GATE)} without a gate", config.activation)
    if config.activation == "gelu" or not config.is_gated:
        of = config.activation + " without a gate" * (not config.is_gated)
        for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"):
            if getattr(config, name, None) is not None:
                _refuse(f"{name} None for {of}", getattr(config, name))
        return "geglu_erf" if config.is_gated else NO_GATE[config.activation]
    if config.activation != "silu":
        _refuse("activation silu or gelu", config.activation)
    if alpha is None:
        if beta is not None:
            _refuse("gemm1_beta None without gemm1_alpha", beta)
        if clamp is not None:  # is applied after silu there
            _refuse("gemm1_clamp_limit None without gemm1_alpha", clamp)
        return "swiglu" if limit is None else Activation("swiglu_clamped", 1.0, limit, 0.0)
    if clamp is None:
        _refuse("gemm1_clamp_limit beside gemm1_alpha", clamp)
    if limit is not None:
        _refuse("swiglu_limit None beside gemm1_alpha", limit)
    if beta not in (None, 1.0):
        _refuse("gemm1_beta 1.0", beta)
    return Activation("swiglu_oai", alpha, clamp, 1.0)


def _is_interleaved(config) -> bool:
    """Whether rows of gate and up come by turns: of no meaning without gemm1_alpha."""
    return config.gemm1_alpha is not None and config.gate_up_interleaved


def _format(quant_info) -> str | None:
    """Where it is not to be found by dtypes."""
    if quant_info.w13_weight.dtype not in _FP4:
        return None
    return "mxfp4_fp8" if quant_info.use_fp8_w8a8 else "mxfp4_bf16"


def _check_weights(quant_info) -> None:
    if not is_dataclass(quant_info) or not hasattr(quant_info, "use_fp8_w8a8"):
        _refuse("TritonMoeQuantInfo", type(quant_info).__name__)
    dtype = quant_info.w13_weight.dtype
    if not quant_info.use_fp8_w8a8 and dtype not in (torch.bfloat16, *_FP4):
        got = str(dtype).removeprefix("torch.")
        _refuse("use_fp8_w8a8 or weights in bfloat16 or MXFP4", got)
    if quant_info.block_shape is not None and list(quant_info.block_shape) != BLOCK:
        _refuse(f"block_shape {BLOCK} or None", quant_info.block_shape)
    _check_defaults(quant_info, _WEIGHTS)
    static = {"a13_scale": quant_info.a13_scale, "a2_scale": quant_info.a2_scale}
    check_static(static, len(quant_info.w13_weight))


def _tokens(dispatch_output):
    """Rows, their scales or None, and the routing."""
    x, scale = dispatch_output.hidden_states, dispatch_output.hidden_states_scale
    topk = dispatch_output.topk_output
    if not hasattr(topk, "topk_ids"):
        _refuse("a topk_output with topk_ids", type(topk).__name__)
    if getattr(dispatch_output, "hidden_states_per_token_scale", None) is not None:
        _refuse("hidden_states_per_token_scale None", "a tensor")
    if scale is not None and x.dtype != torch.float8_e4m3fn:
        _refuse("hidden_states_scale None beside hidden_states that are not e4m3", "a tensor")
    return x, scale, topk


def _check_defaults(data, known: set[str]) -> None:
    """Raise NotImplementedError for a field beside `known` that is not at its default."""
    for name, default in _defaults(type(data)):
        if name in known:
            continue
        got = getattr(data, name)
        is_tensor = isinstance(got, torch.Tensor)
        if got is not default and (is_tensor or got != default):
            _refuse(f"{name} {default}", "a tensor" if is_tensor else got)


@cache
def _defaults(kind: type) -> list[tuple[str, object]]:
    return [(f.name, None if f.default is MISSING else f.default) for f in fields(kind)]


def _refuse(allowed: str, got) -> None:
    raise NotImplementedError(
        f'the MoE runner "{NAME}" needs {allowed}, got {got}; choose another --moe-runner-backend'
    )
