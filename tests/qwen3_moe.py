"""A tiny Qwen3-MoE with the weights of torch_layer, in bf16 and with FP8 experts."""

from __future__ import annotations

import torch
import transformers
from torch_layer import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, WEIGHTS
from transformers.integrations import finegrained_fp8

from jitmoe.peers.weights import dequantized

NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")


def config(**changes):
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}
    rest = {"vocab_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": TOP_K}
    return transformers.Qwen3MoeConfig(**(sizes | rest | heads | changes))


def bf16_model(implementation="eager", **changes):
    """Two layers whose experts hold the layer's weights, dequantised."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        config(**changes), dtype=torch.bfloat16, experts_implementation=implementation
    )
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.gate_up_proj.data = dequantized(WEIGHTS[0], WEIGHTS[2])
        experts.down_proj.data = dequantized(WEIGHTS[1], WEIGHTS[3])
    return model.eval()


def fp8_model(implementation="jitmoe", scale_fmt="float", **changes):
    """The same model as a checkpoint of FP8 experts is loaded: only the experts are quantised."""
    model = empty_fp8_model(implementation, {"scale_fmt": scale_fmt}, **changes)
    for layer in model.model.layers:
        for name, tensor in zip(NAMES, WEIGHTS, strict=True):
            dtype = getattr(layer.mlp.experts, name).dtype
            parameter = torch.nn.Parameter(tensor.to(dtype), requires_grad=False)
            setattr(layer.mlp.experts, name, parameter)
    return model


def empty_fp8_model(implementation, quantisation, **changes):
    """With FP8 experts as a FineGrainedFP8Config of `quantisation` makes them, without values."""
    model = bf16_model(implementation, **changes)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head", "gate"]
    finegrained_fp8.replace_with_fp8_linear(
        model,
        modules_to_not_convert=linear,
        quantization_config=transformers.FineGrainedFP8Config(**quantisation),
    )
    return model
