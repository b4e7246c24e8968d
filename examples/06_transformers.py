"""A tiny Qwen3-MoE of transformers with FP8 experts, random weights and no download: one launch a
layer.

    python examples/06_transformers.py

Needs the transformers extra and a Hopper GPU; without them it says so and stops.
"""

import sys
from importlib.util import find_spec

from jitmoe.run.driver import num_devices

if find_spec("torch") is None or find_spec("transformers") is None:
    print("no PyTorch or no transformers here; pip install '.[cu13,transformers]'")
    sys.exit()
if num_devices() == 0:
    print("no GPU here; this example needs an H100, H200 or H20")
    sys.exit()

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear  # noqa: E402

from jitmoe.integrations.transformers import register  # noqa: E402

config = Qwen3MoeConfig(
    vocab_size=1024,
    hidden_size=1024,
    moe_intermediate_size=512,
    num_experts=32,
    num_experts_per_tok=4,
    num_hidden_layers=4,
)
torch.manual_seed(0)
register()
model = AutoModelForCausalLM.from_config(
    config, dtype=torch.bfloat16, experts_implementation="jitmoe"
)
# What from_pretrained does for a checkpoint in FP8; here for the experts alone.
replace_with_fp8_linear(
    model,
    modules_to_not_convert=["q_proj", "k_proj", "v_proj", "o_proj", "gate", "lm_head"],
    quantization_config=FineGrainedFP8Config(),
)
for layer in model.model.layers:
    for name, empty in layer.mlp.experts.named_parameters():
        value = torch.full(empty.shape, 0.02) if "scale" in name else torch.randn(empty.shape)
        parameter = torch.nn.Parameter(value.to(empty.dtype), requires_grad=False)
        setattr(layer.mlp.experts, name, parameter)
model = model.cuda().eval()

prompt = torch.arange(32, device="cuda")[None]
tokens = model.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)
again = model.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)
print(
    f"{tokens.shape[1] - prompt.shape[1]} tokens after {prompt.shape[1]}: {tokens[0, 32:].tolist()}"
)
assert torch.equal(tokens, again)
