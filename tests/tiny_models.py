"""Models of transformers whose experts go through its interface, tiny, by their configurations."""

from __future__ import annotations

import importlib
import inspect

import torch
import transformers
from transformers.integrations import finegrained_fp8

from jitmoe import mxfp4, quantize

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 128, 64, 4, 2
# By what the families call them; a configuration takes those that it has. All layers have experts.
SIZES = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"],
    "enable_moe_block": True,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INTERMEDIATE),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("moe_num_experts",), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), TOP_K),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
}
FULL = {"layer_types": ["full_attention"]}
JAMBA = {"attn_layer_period": 1, "attn_layer_offset": 0}
JAMBA |= {"expert_layer_period": 1, "expert_layer_offset": 0}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32}
INDEXER |= {"indexer_budget": 32, "indexer_compress_ratio": 4}
# Configurations of language models, and what else a tiny one needs.
LANGUAGE_MODELS = {
    "AXK1Config": {},
    "AXK2Config": {},
    "AfmoeConfig": {},
    "AriaTextConfig": {},
    "BailingHybridConfig": FULL,
    "BeamConfig": {},
    "Cohere2MoeConfig": {},
    "DeepseekV2Config": {},
    "DeepseekV32Config": {},
    "DeepseekV3Config": {},
    "DeepseekV4Config": {"mlp_layer_types": ["moe"]},
    "Dots1Config": {},
    "Dots3NoteTextConfig": {},
    "Ernie4_5_MoeConfig": {},
    "ExaoneMoeConfig": {},
    "FlexOlmoConfig": {},
    "FlintConfig": {},
    "Gemma4TextConfig": {},
    "Glm4MoeConfig": {},
    "Glm4MoeLiteConfig": {},
    "GlmMoeDsaConfig": {},
    "GptOssConfig": {},
    "GraniteMoeConfig": {},
    "GraniteMoeHybridConfig": FULL,
    "GraniteMoeSWAConfig": {},
    "GraniteMoeSharedConfig": {},
    "HYV3Config": {},
    "HYV4Config": {},
    "HunYuanMoEV1Config": {},
    "InklingTextConfig": {},
    "JambaConfig": JAMBA,
    "KimiLinearConfig": FULL,
    "Kolibri1Config": {},
    "LagunaConfig": {},
    "LaraMiniConfig": FULL,
    "Lfm2MoeConfig": FULL,
    "MellumConfig": {},
    "MiMoV2FlashConfig": {},
    "MiniMaxConfig": {},
    "MiniMaxM2Config": {},
    "MiniMaxM3VLTextConfig": {},
    "Mistral4Config": {"class": "Mistral4ForCausalLM"},
    "MixtralConfig": {},
    "NemotronHConfig": {"layers_block_type": ["attention", "moe"]},
    "OlmoeConfig": {},
    "PhimoeConfig": {},
    "Qwen2MoeConfig": {},
    "Qwen3MoeConfig": {},
    "Qwen3NextConfig": FULL,
    "Qwen3_5MoeTextConfig": FULL,
    "Qwen4ExpTextConfig": INDEXER | FULL,
    "SolarOpenConfig": {},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
# Those of models without a head, as multimodal ones have them.
BODIES = {
    "DeepseekOcr2TextConfig": {"class": "DeepseekOcr2TextModel"},
    "DiffusionGemmaTextConfig": {"class": "DiffusionGemmaEncoderTextModel"},
    "Ernie4_5_VLMoeTextConfig": {
        "class": "Ernie4_5_VLMoeTextModel",
        "moe_intermediate_size": [INTERMEDIATE, INTERMEDIATE],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
    "Glm4vMoeTextConfig": {"class": "Glm4vMoeTextModel", "head_dim": 128},
    "Glm5NextTextConfig": {"class": "Glm5NextTextModel", "qk_rope_head_dim": 0} | FULL,
    "HYV4VLTextConfig": {"class": "HYV4VLTextModel", "qk_rope_head_dim": 64},
    "MistralLarge4TextConfig": {"class": "MistralLarge4TextModel"},
    "OpenAIPrivacyFilterConfig": {"class": "OpenAIPrivacyFilterModel"},
    "Qwen3OmniMoeTextConfig": {"class": "Qwen3OmniMoeThinkerTextModel"},
    "Qwen3VLMoeTextConfig": {"class": "Qwen3VLMoeTextModel"},
    "UnlimitedOcrTextConfig": {"class": "UnlimitedOcrTextModel"},
}
# Those that transformers cannot make FP8 experts of.
NOT_IN_FP8 = {"AriaTextConfig", "GptOssConfig", "Lfm2MoeConfig", "NemotronHConfig"}
# Experts that do not go through the interface, by the folders of their models: they stay eager.
EAGER = {"dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7"}
# Those that are refused, and the words of it.
REFUSED = {
    "Inkling2LoopTextConfig": ({}, "silu, gelu or relu2, got Inkling2LoopSoftcapped"),
    "Inkling2TextConfig": ({}, "silu, gelu or relu2, got Inkling2SoftcappedSwiGLU"),
    "MuseSparkTextConfig": ({"class": "MuseSparkTextModel"}, "needs has_post_expert_norm False"),
}


def config_class(name: str):
    """None where this transformers has no such model."""
    return getattr(transformers, name, None)


def build(name: str, **changes):
    """The model of a configuration, in bf16, eager; the experts' weights from N(0, 0.2)."""
    kind = config_class(name)
    changes = dict(changes)
    model_class = changes.pop("class", None)
    config = kind(**known_sizes(kind) | changes)
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "experts_implementation": "eager"}
    if model_class is None:
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
    else:
        module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
        model = getattr(module, model_class)._from_config(config, **options)
    for experts in experts_of(model):
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def known_sizes(kind, sizes=SIZES) -> dict:
    """Those that a class of configurations has."""
    known = set(inspect.signature(kind.__init__).parameters)
    known.update(*(vars(base).get("__annotations__", {}) for base in kind.__mro__))
    return {key: size for key, size in sizes.items() if key in known}


def experts_of(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


@torch.no_grad()
def quantized(model, in_fp4: bool = False):
    """Give `model` FP8 experts, as a checkpoint in FP8, or DeepSeek-V4's in FP4, is loaded. Returns
    pairs: those that it had, with the values that the format has left of them, and those that it
    has now.
    """
    linear = torch.nn.Linear
    names = [name for name, module in model.named_modules() if isinstance(module, linear)]
    old = {name: m for name, m in model.named_modules() if hasattr(m, "is_transposed")}
    fp4 = {"expert_dtype": "fp4", "scale_fmt": "ue8m0"} if in_fp4 else {}
    config = transformers.FineGrainedFP8Config(**fp4)
    finegrained_fp8.replace_with_fp8_linear(
        model, modules_to_not_convert=names, quantization_config=config
    )
    for name, experts in old.items():
        new = model.get_submodule(name)
        for part in ("gate_up_proj", "down_proj"):
            weights = getattr(experts, part)
            values, *parameters = (_fp4 if in_fp4 else _fp8)(weights.detach().float().numpy())
            weights.copy_(values)
            for field, value in zip((part, f"{part}_scale_inv"), parameters, strict=True):
                whole = value.expand(getattr(new, field).shape).clone()
                setattr(new, field, torch.nn.Parameter(whole, requires_grad=False))
    return [(experts, model.get_submodule(name)) for name, experts in old.items()]


def _fp8(weights):
    """Values that are left, codes and scales."""
    codes, scale = map(torch.from_numpy, quantize.weights(weights, "fp8_block"))
    codes = codes.view(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return codes.float() * wide[:, : codes.shape[1], : codes.shape[2]], codes, scale


def _fp4(weights):
    codes, scale = quantize.weights(weights, "mxfp4_fp8")
    values = torch.from_numpy(mxfp4.dequantize_mxfp4(codes, scale))
    codes, scale = map(torch.from_numpy, (codes, scale))
    return values, codes.view(torch.int8), scale.view(torch.float8_e8m0fnu)
