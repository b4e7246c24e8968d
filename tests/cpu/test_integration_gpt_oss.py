"""A tiny gpt-oss from a checkpoint in MXFP4 through the emulated kernel, beside transformers' own,
dequantised.
"""

import json

import pytest

from jitmoe.emulate.compile import NoHostCompiler, compiler

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'jitmoe[transformers]'")
transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'jitmoe[transformers]'"
)

from safetensors.torch import load_file  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from jitmoe.integrations import transformers_mxfp4 as integration  # noqa: E402

try:
    compiler()
except NoHostCompiler as error_:
    pytest.skip(str(error_), allow_module_level=True)

PROMPT = torch.arange(12)[None]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(integration.Mxfp4Experts, "backend", "emulated")


def config():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return transformers.GptOssConfig(
        **heads, **sizes, **tokens, num_local_experts=4, num_experts_per_tok=2
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder of random blocks, scales and biases under the names of openai/gpt-oss-20b."""
    torch.manual_seed(0)
    model = integration.GptOssForCausalLM(config()).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("_blocks"):
            parameter.data.random_(0, 256)
        elif name.endswith("_scales"):
            parameter.data.random_(119, 124)
        elif name.endswith("proj_bias"):
            parameter.data.normal_()
    folder = tmp_path_factory.mktemp("gpt-oss")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.save_pretrained(folder)
    return folder


def load(folder, **options):
    kind = integration.GptOssForCausalLM
    return kind.from_pretrained(folder, dtype=torch.bfloat16, **options)


def dequantized(folder):
    """transformers' model with what its own function makes of the blocks."""
    model = transformers.GptOssForCausalLM(config()).bfloat16()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        tensors[name.removesuffix("_blocks")] = convert_moe_packed_tensors(blocks, scales)
    model.load_state_dict(tensors)
    return model.eval()


@torch.no_grad()
def test_logits_and_generation(checkpoint):
    model, wanted = load(checkpoint), dequantized(checkpoint)
    logits = wanted(PROMPT).logits.float()
    assert (model(PROMPT).logits.float() - logits).norm() < 0.02 * logits.norm()
    tokens = model.generate(PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 15)


@torch.no_grad()
def test_experts(checkpoint):
    """On the same tokens; ids of other ranks' experts are unused slots; compiled too."""
    experts, eager = (
        m.model.layers[1].mlp.experts for m in (load(checkpoint), dequantized(checkpoint))
    )
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    scores, ids = torch.rand(9, 4, generator=torch.Generator().manual_seed(2)).topk(2)
    y, wanted = experts(x, ids, scores.bfloat16()), eager(x, ids, scores.bfloat16())
    assert (y.float() - wanted.float()).norm() < 0.01 * wanted.float().norm()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, scores.bfloat16()), y)
    assert not experts(x, torch.full_like(ids, 4), scores).any()


def test_the_checkpoint_is_used_and_saved_as_it_is(checkpoint, tmp_path):
    model = load(checkpoint)
    before = load_file(checkpoint / "model.safetensors")
    experts = model.model.layers[0].mlp.experts
    name = "model.layers.0.mlp.experts.gate_up_proj_"
    for part, shape in (("blocks", [4, 128, 3, 16]), ("scales", [4, 128, 3])):
        parameter = getattr(experts, f"gate_up_proj_{part}")
        assert list(parameter.shape) == shape and torch.equal(parameter, before[name + part])
    model.save_pretrained(tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    assert set(after) == set(before)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    configs = [json.loads((f / "config.json").read_text()) for f in (checkpoint, tmp_path)]
    assert configs[0] == configs[1] and configs[0]["architectures"] == ["GptOssForCausalLM"]


def test_a_configuration_that_is_given(checkpoint):
    own = transformers.AutoConfig.from_pretrained(checkpoint)
    model, info = load(checkpoint, config=own, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert own.quantization_config == model.config.quantization_config == {"quant_method": "mxfp4"}
    own.quantization_config = transformers.Mxfp4Config()
    assert load(checkpoint, config=own).config.quantization_config["quant_method"] == "mxfp4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": config()}, "must be a checkpoint in MXFP4, got quantization_config None; load"),
        ({"quantization_config": transformers.Mxfp4Config()}, "quantization_config must be None"),
        ({"tp_plan": "auto"}, "tp_plan must be None, got 'auto'; leave it out"),
    ],
    ids=["not quantised", "dequantised", "tensor parallel"],
)
def test_refusals(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        load(checkpoint, **options)


@torch.no_grad()
def test_the_cpu_is_used_only_if_asked(checkpoint, monkeypatch):
    monkeypatch.setattr(integration.Mxfp4Experts, "backend", "cuda")
    with pytest.raises(TypeError, match="w13 must be on a GPU"):
        load(checkpoint)(PROMPT)
