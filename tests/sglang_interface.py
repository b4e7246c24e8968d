"""What of SGLang 0.5.23 an adapter meets: names, signatures and contracts, none of its code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: Any = None
    routing_method_type: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True


@dataclass
class MoeQuantInfo:
    pass


@dataclass
class TritonMoeQuantInfo(MoeQuantInfo):
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    a13_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    block_shape: list[int] | None = None


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class BypassedTopKOutput(NamedTuple):
    router_logits: torch.Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any
    hidden_states_pre_quant: tuple | None = None


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config):
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self): ...

    @abstractmethod
    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None): ...


@dataclass(frozen=True)
class RegisteredMoeRunnerBackend:
    value: str


FACTORIES: dict = {}


def register_moe_runner_core(backend_name, factory):
    if backend_name in FACTORIES:
        raise ValueError(f"{backend_name} is already registered")
    FACTORIES[backend_name] = factory


def resolve_moe_runner_backend(backend):
    if backend not in FACTORIES:
        raise ValueError(f"{backend!r} is neither built in nor registered")
    return RegisteredMoeRunnerBackend(backend)


class MoeRunner:
    """A layer's runner: the core of a name, made once, and called with its own configuration."""

    def __init__(self, runner_backend, config):
        self.config = config
        self.runner_core = FACTORIES[runner_backend.value](config)

    def run(self, dispatch_output, quant_info, hooks=None):
        return self.runner_core.run_from_dispatch(
            dispatch_output, quant_info, self.config, hooks=hooks
        )


MOE = "sglang.srt.layers.moe"
PLACES = {
    f"{MOE}.moe_runner.base": [DispatchMoeRunnerCore, MoeRunnerConfig, MoeQuantInfo],
    f"{MOE}.moe_runner.runner": [register_moe_runner_core, MoeRunner],
    f"{MOE}.moe_runner.triton": [TritonMoeQuantInfo],
    f"{MOE}.token_dispatcher.standard": [StandardDispatchOutput, StandardCombineInput],
    f"{MOE}.topk": [StandardTopKOutput],
    f"{MOE}.utils": [RegisteredMoeRunnerBackend, resolve_moe_runner_backend],
}
