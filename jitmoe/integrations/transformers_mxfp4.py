"""gpt-oss in MXFP4 as its checkpoint is: a model class whose experts take one launch a layer."""

from __future__ import annotations

from copy import deepcopy

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from jitmoe import Activation
from jitmoe.integrations.torch import mega_moe
from jitmoe.mxfp4 import MX_GROUP

# Arguments of from_pretrained that say where a configuration lies, and some that it must not have.
_PLACE = {"cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"}
_REFUSED = ("quantization_config", "tp_plan", "distributed_config")


class Mxfp4Experts(nn.Module):
    """Experts of gpt-oss under the names of its checkpoint, used in place.

    config   GptOssConfig
    backend  as in `jitmoe.integrations.torch.mega_moe`; an attribute of the class too

    gate_up_proj_blocks  uint8 [num_experts, 2 * intermediate, hidden / 32, 16], two codes each
    gate_up_proj_scales  uint8 (e8m0) [num_experts, 2 * intermediate, hidden / 32]
    gate_up_proj_bias    [num_experts, 2 * intermediate] of the model's dtype; gate and up by turns
    down_proj_*          the same of [num_experts, hidden, intermediate]

    A copy of the scales in the kernel's order is made at the first call and kept with them.
    """

    backend = "cuda"

    def __init__(self, config):
        super().__init__()
        num_experts, hidden = config.num_local_experts, config.hidden_size
        for name, rows, cols in (
            ("gate_up_proj", 2 * config.intermediate_size, hidden),
            ("down_proj", hidden, config.intermediate_size),
        ):
            groups = num_experts, rows, cols // MX_GROUP
            blocks = torch.empty(*groups, MX_GROUP // 2, dtype=torch.uint8)
            self._add(f"{name}_blocks", blocks)
            self._add(f"{name}_scales", torch.empty(groups, dtype=torch.uint8))
            self._add(f"{name}_bias", torch.empty(groups[:2]))
        numbers = (getattr(config, name, None) for name in ("swiglu_alpha", "swiglu_limit"))
        self.activation = Activation("swiglu_oai", *numbers)  # None is gpt-oss's own

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_indices: torch.Tensor,
        routing_weights: torch.Tensor,
    ) -> torch.Tensor:
        """hidden_states [num_tokens, hidden] bf16; the others [num_tokens, top_k]."""
        return mega_moe(
            hidden_states.contiguous(),
            router_indices.contiguous(),
            routing_weights.contiguous(),
            self.gate_up_proj_blocks.flatten(-2),
            self.down_proj_blocks.flatten(-2),
            self.gate_up_proj_scales,
            self.down_proj_scales,
            w13_bias=self.gate_up_proj_bias,
            w2_bias=self.down_proj_bias,
            activation=self.activation,
            gate_up="interleaved",
            format="mxfp4_bf16",
            backend=self.backend,
        )


class GptOssForCausalLM(transformers.GptOssForCausalLM):
    """transformers' class with `Mxfp4Experts`: neither dequantised nor brought into the layout of
    Triton's kernels, which transformers' own MXFP4 needs. `save_pretrained` writes the names and
    bytes of the checkpoint.
    """

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = Mxfp4Experts(config)

    @classmethod
    def from_pretrained(cls, name, *args, config=None, **kwargs):
        """As transformers', with `dtype` torch.bfloat16. Raises ValueError, one sentence, for a
        checkpoint that is not in MXFP4, and for arguments that would lay its experts out otherwise.
        """
        for key in _REFUSED:
            if kwargs.get(key) is not None:
                raise ValueError(
                    f"{key} must be None, got {kwargs[key]!r}; leave it out, or take "
                    "AutoModelForCausalLM"
                )
        if config is None:
            config = AutoConfig.from_pretrained(
                name, **{k: kwargs[k] for k in _PLACE & set(kwargs)}
            )
        quantization = getattr(config, "quantization_config", None)
        if isinstance(quantization, QuantizationConfigMixin):
            quantization = quantization.to_dict()
        if (quantization or {}).get("quant_method") != "mxfp4":
            raise ValueError(
                f"{name} must be a checkpoint in MXFP4, got quantization_config {quantization}; "
                'load others by AutoModelForCausalLM with experts_implementation="jitmoe"'
            )
        config = deepcopy(config)
        del config.quantization_config  # no quantiser of transformers is to touch the tensors
        loaded = super().from_pretrained(name, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.quantization_config = quantization  # for save_pretrained
        return loaded
