"""Model presets and the reading of Hugging Face configurations."""

import json
from itertools import product

import pytest

from jitmoe.plan import models
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.models import MODELS, ModelShape, from_config, model_shape
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import Activation, Variant

SHAPES = {
    "deepseek-v3": (7168, 2048, 256, 8),
    "deepseek-v4-flash": (4096, 2048, 256, 6),
    "deepseek-v4-pro": (7168, 3072, 384, 6),
    "glm-4.5": (5120, 1536, 160, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "kimi-k2": (7168, 2048, 384, 8),
    "minimax-m2": (3072, 1536, 256, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "nemotron-3-nano-30b-a3b": (2688, 1856, 128, 6),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "qwen3-next-80b-a3b": (2048, 512, 512, 10),
}


def shape_of(model):
    return model.hidden, model.intermediate, model.num_experts, model.top_k


def test_presets():
    assert {name: shape_of(model) for name, model in MODELS.items()} == SHAPES
    assert all(model.name == name and model.source for name, model in MODELS.items())
    assert models.MODELS is MODELS
    kinds = dict.fromkeys(("deepseek-v4-flash", "deepseek-v4-pro"), "swiglu_clamped")
    kinds["nemotron-3-nano-30b-a3b"] = "relu2_no_gate"
    kinds |= dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "swiglu_oai")
    for name, model in MODELS.items():
        assert model.activation == Activation(kinds.get(name, "swiglu"))
        is_oss = name.startswith("gpt-oss")
        assert model.variant == Variant(
            model.activation, gate_up="interleaved" if is_oss else "gate_first", has_bias=is_oss
        )
        assert model.format == ("mxfp4_bf16" if is_oss else "fp8_block")
        assert ("--format bf16" in model.note) == is_oss
        assert ("--format mxfp4_fp8" in model.note) == name.startswith("deepseek-v4")
    assert MODELS["deepseek-v4-pro"].activation.limit == 10
    with pytest.raises(AttributeError, match="MODELZ"):
        models.MODELZ  # noqa: B018


@pytest.mark.parametrize("name", SHAPES)
def test_presets_plan_on_every_hopper(name):
    model = model_shape(name)
    gpus = [gpu for gpu in GPUS.values() if gpu.arch == "sm_90a"]
    ranks = [ep for ep in (1, 2, 4, 8, 16, 32, 64) if model.num_experts % ep == 0]
    assert ranks[:4] == [1, 2, 4, 8]
    for gpu, ep, num_tokens in product(gpus, ranks, (0, 1, 32, 512, 8192)):
        choose(model.problem(num_tokens, ep), gpu, **model.variant.plan_fields).check(gpu)


def test_names():
    assert model_shape("DeepSeek-V3") is MODELS["deepseek-v3"]
    assert model_shape("Qwen/Qwen3-30B-A3B") is MODELS["qwen3-30b-a3b"]
    with pytest.raises(ValueError) as error:
        model_shape("qwen3-30b")
    message = str(error.value)
    assert all(name in message for name in SHAPES)
    assert "got 'qwen3-30b'; did you mean qwen3-30b-a3b" in message
    with pytest.raises(ValueError, match="got 'gpt'; give the path of a config.json"):
        model_shape("gpt")
    assert model_shape("openai/gpt-oss-20b") is MODELS["gpt-oss-20b"]


def test_problem_of_one_rank():
    model = model_shape("deepseek-v3")
    assert model.problem(5) == MoeProblem(5, 7168, 2048, 256, 8)
    assert model.problem(5, ep=8) == MoeProblem(5, 7168, 2048, 32, 8)
    assert model.problem(5, format="bf16").format == "bf16"
    assert model_shape("gpt-oss-20b").problem(5) == MoeProblem(5, 2880, 2880, 32, 4, "mxfp4_bf16")
    # The docstring's figure for true routing: 8 tokens, each hitting an expert with 8 / 256.
    true_hits = 32 * (1 - (1 - 8 / 256) ** 8)
    assert round(true_hits, 1) == 7.2
    assert model.problem(1, ep=8).num_active_experts == 8
    for ep in (0, -8, 7, 512, 1.0, "8"):
        with pytest.raises(ValueError, match="ep must divide the 256 experts of deepseek-v3, got"):
            model.problem(5, ep=ep)
    with pytest.raises(ValueError, match="num_tokens must be"):
        model.problem(-1)


# Shapes as the families write them; numbers of other layers and of generation must not be taken.
CONFIGS = {
    "deepseek": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "top_k": 50,
        },
        (7168, 2048, 256, 8),
    ),
    "qwen3": (
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        (2048, 768, 128, 8),
    ),
    "mixtral": (
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        (4096, 14336, 8, 2),
    ),
    "kimi_linear": (
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_experts_per_token": 8,
        },
        (2304, 1024, 256, 8),
    ),
    "per_layer_lists": (
        {
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "moe_intermediate_size": [1536, 1536],
            "moe_num_experts": [64, 64],
            "moe_k": 6,
        },
        (2560, 1536, 64, 6),
    ),
    "multimodal": (
        {
            "model_type": "some_vl",
            "hidden_size": 1152,
            "vision_config": {"hidden_size": 1152, "intermediate_size": 4304},
            "text_config": {
                "hidden_size": 2048,
                "intermediate_size": 11264,
                "moe_intermediate_size": 1408,
                "n_routed_experts": 64,
                "num_experts_per_tok": 6,
            },
        },
        (2048, 1408, 64, 6),
    ),
    "nested_twice": (
        {
            "thinker_config": {
                "text_config": {
                    "hidden_size": 2048,
                    "moe_intermediate_size": 768,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                }
            }
        },
        (2048, 768, 128, 8),
    ),
}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "config.json"


@pytest.mark.parametrize("family", CONFIGS)
def test_from_config(family, tmp_path):
    config, expected = CONFIGS[family]
    path = write(tmp_path, config)
    model = from_config(path)
    assert shape_of(model) == expected
    assert model.name == config.get("model_type", tmp_path.name) and model.source == str(path)
    assert from_config(str(tmp_path)) == model


GOOD = CONFIGS["qwen3"][0]
NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_latent_size": None,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
}


def test_experts_without_a_gate(tmp_path):
    """By their family; with latent projections, what comes to the experts are their channels."""
    model = from_config(write(tmp_path, NEMOTRON))
    assert shape_of(model) == shape_of(MODELS["nemotron-3-nano-30b-a3b"]) == (2688, 1856, 128, 6)
    assert model.activation == MODELS["nemotron-3-nano-30b-a3b"].activation
    problem = model.problem(8, format="bf16")
    assert not problem.gated and problem.expert_bytes == 2 * 2 * 2688 * 1856
    latent = from_config(write(tmp_path, NEMOTRON | {"moe_latent_size": 1024}))
    assert shape_of(latent) == (1024, 1856, 128, 6)
    for name, kind in {"silu": "silu_no_gate", "gelu_new": "gelu_tanh_no_gate"}.items():
        changed = from_config(write(tmp_path, NEMOTRON | {"mlp_hidden_act": name}))
        assert changed.activation.kind == kind
    with pytest.raises(ValueError, match="mlp_hidden_act must be one of relu2, .*, got 'relu'; th"):
        from_config(write(tmp_path, NEMOTRON | {"mlp_hidden_act": "relu"}))
    with pytest.raises(ValueError, match="limit must be None for relu2_no_gate, which takes no nu"):
        from_config(write(tmp_path, NEMOTRON | {"swiglu_limit": 7.0}))


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, "swiglu"),
        ({"hidden_act": "silu", "routed_scaling_factor": 2.5}, "swiglu"),
        ({"hidden_act": "silu", "swiglu_limit": None, "swiglu_limits": [0.0, None]}, "swiglu"),
        ({"hidden_act": "silu", "swiglu_limit": 10}, Activation("swiglu_clamped", limit=10.0)),
        ({"swiglu_limit": 5.0, "swiglu_alpha": 1.5}, Activation("swiglu_oai", 1.5, 5.0, 1.0)),
        ({"model_type": "gpt_oss", "swiglu_limit": 6.0}, Activation("swiglu_oai", limit=6.0)),
        ({"hidden_act": "swigluoai"}, "swiglu_oai"),
        ({"hidden_act": "gelu"}, "geglu_erf"),
        ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "geglu_tanh"),
    ],
    ids=str,
)
def test_activation_of_a_config(changes, activation, tmp_path):
    assert from_config(write(tmp_path, GOOD | changes)).activation == Activation.of(activation)


def test_from_config_of_gpt_oss(tmp_path):
    """What its code knows and its configuration does not say."""
    config = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880}
    config |= {"num_local_experts": 32, "num_experts_per_tok": 4, "hidden_act": "silu"}
    config |= {"swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}}
    model, preset = from_config(write(tmp_path, config)), model_shape("gpt-oss-20b")
    assert shape_of(model) == shape_of(preset)
    assert (model.variant, model.format) == (preset.variant, preset.format)
    del config["quantization_config"]
    model = from_config(write(tmp_path, config))
    assert (model.variant, model.format) == (preset.variant, "bf16")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "format"),
    [
        ({}, "fp8_block"),
        ({"quantization_config": None}, "fp8_block"),
        ({"quantization_config": FP8}, "fp8_block"),
        ({"quantization_config": FP8 | {"expert_dtype": "fp4"}}, "mxfp4_fp8"),
        ({"quantization_config": FP8, "expert_dtype": "fp4"}, "mxfp4_fp8"),
        ({"quantization_config": FP8, "expert_dtype": "fp8"}, "fp8_block"),
        ({"expert_dtype": "fp4"}, "fp8_block"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4_bf16"),
        ({"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}, "fp8_block"),
    ],
    ids=str,
)
def test_format_of_a_config(changes, format, tmp_path):
    assert from_config(write(tmp_path, GOOD | changes)).format == format
    nested = {"text_config": GOOD} | changes
    assert from_config(write(tmp_path, nested)).format == format


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu2"}, "hidden_act must be one of silu, .*, got 'relu2'; there is no"),
        ({"mlp_hidden_act": "relu2", "hidden_act": "silu"}, "mlp_hidden_act must be one of silu"),
        ({"mlp_gate_softcap": 5.0}, "mlp_gate_softcap is a soft cap on the gate, which .* got 5.0"),
        ({"swiglu_limits": [0, 16.0]}, "swiglu_limits is limits after the activation, layer by"),
        ({"hidden_act": "gelu", "swiglu_limit": 7.0}, "limit must be None for geglu_erf, which"),
        ({"swiglu_limit": "7"}, "config.json: limit must be a number, got str"),
        ({"swiglu_limit": -7.0}, "config.json: limit must be positive, got -7"),
    ],
)
def test_activations_of_a_config_that_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        from_config(write(tmp_path, GOOD | changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "describes no mixture of experts: it sets none of n_routed_experts, "),
        ({"num_experts_per_tok": None}, "must set the model's top_k, under one of num_experts_per"),
        ({"hidden_size": None}, "the model's hidden, under one of moe_latent_size, hidden_si"),
        ({"moe_intermediate_size": [768, 384]}, "the same in every layer, got .768, 384."),
        ({"hidden_size": "2048"}, "hidden must be a positive integer, got '2048'"),
        ({"num_experts_per_tok": 8.5}, "top_k must be a positive integer, got 8.5"),
        ({"num_experts_per_tok": -1}, "top_k must be a positive integer, got -1"),
        ({"num_experts_per_tok": True}, "top_k must be a positive integer, got True"),
        ({"num_experts_per_tok": 129}, "top_k must not exceed its 128 experts, got 129"),
    ],
)
def test_from_config_refuses(changes, message, tmp_path):
    path = write(tmp_path, GOOD | changes)
    with pytest.raises(ValueError, match=message) as error:
        from_config(path)
    assert "\n" not in str(error.value)


def test_from_config_refuses_files(tmp_path):
    with pytest.raises(ValueError, match="config.json must be a readable config.json: .*No such"):
        from_config(tmp_path)
    path = tmp_path / "broken.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="broken.json must be a readable config.json: "):
        from_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="broken.json must be a readable config.json: "):
        from_config(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        from_config(path)


def test_model_shape_limits_are_those_of_the_problem():
    with pytest.raises(ValueError, match="hidden must be a multiple of 128"):
        ModelShape("odd", 100, 64, 8, 2, "a test").problem(1)
