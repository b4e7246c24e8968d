"""Tokens a second of two models of transformers, built-in experts beside ours: prefill and decode.

    python examples/08_transformers_speed.py [--out speed.jsonl]

Widths are the models' own, layers are few and weights random, so nothing is downloaded. Eager, as
`generate()` runs a model: the host's time counts. Needs the transformers extra and a Hopper GPU;
without them it says so and stops.
"""

import argparse
import json
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

from jitmoe.bench.conditions import conditions
from jitmoe.run.driver import num_devices

if find_spec("torch") is None or find_spec("transformers") is None:
    print("no PyTorch or no transformers here; pip install '.[cu13,transformers]'")
    sys.exit()
if num_devices() == 0:
    print("no GPU here; this example needs an H100, H200 or H20")
    sys.exit()

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear  # noqa: E402

from jitmoe.integrations.transformers import register  # noqa: E402

MODELS = {
    "Qwen3-30B-A3B, 4 layers": transformers.Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_hidden_layers=4,
    ),
    "Mixtral-8x7B, 2 layers": transformers.MixtralConfig(vocab_size=8192, num_hidden_layers=2),
}
IMPLEMENTATIONS = {
    "prefill": ("grouped_mm", "jitmoe"),
    "decode": ("batched_mm", "grouped_mm", "jitmoe"),
}
PREFILL, PROMPT, BATCHES = 2048, 64, (1, 8, 64)
WARMUPS, STEPS = 3, 12


def build(config, is_fp8: bool):
    """The model on the GPU; FP8 experts have codes from N(0, 1) and one scale for all blocks."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if is_fp8:
            linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate", "lm_head"]
            replace_with_fp8_linear(
                model,
                modules_to_not_convert=linear,
                quantization_config=transformers.FineGrainedFP8Config(),
            )
            for layer in model.model.layers:
                for name, empty in layer.mlp.experts.named_parameters():
                    is_scale = "scale" in name
                    value = torch.full(empty.shape, 0.02) if is_scale else torch.randn(empty.shape)
                    parameter = torch.nn.Parameter(value.to(empty.dtype), requires_grad=False)
                    setattr(layer.mlp.experts, name, parameter)
    return model.eval()


def milliseconds(step) -> float:
    """Median of single steps, by events around them."""
    times = []
    for i in range(WARMUPS + STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        if i >= WARMUPS:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def prefill(model):
    """(tokens a second, logits of the last token)."""
    prompt = torch.arange(PREFILL, device="cuda")[None] % 8192
    logits = model(prompt, logits_to_keep=1).logits
    ms = milliseconds(lambda: model(prompt, logits_to_keep=1))
    return PREFILL / ms * 1e3, logits.float()


def decode(model, batch: int):
    """(tokens a second, logits of the first token after a prompt)."""
    prompt = torch.arange(batch * PROMPT, device="cuda").view(batch, PROMPT) % 8192
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    token = prompt[:, :1]
    logits = model(token, past_key_values=cache, use_cache=True).logits.float()
    ms = milliseconds(lambda: model(token, past_key_values=cache, use_cache=True))
    return batch / ms * 1e3, logits


def measure(model, experts: str, work, *args) -> dict:
    model.set_experts_implementation(experts)
    try:
        per_second, logits = work(model, *args)
    except Exception as error:  # an implementation that needs what is not installed
        return {"experts": experts, "refused": f"{type(error).__name__}: {str(error)[:120]}"}
    return {"experts": experts, "tokens_per_s": round(per_second), "logits": logits}


@torch.no_grad()
def rows():
    register()
    for name, config in MODELS.items():
        for experts_format in ("bf16", "fp8"):
            model = build(config, experts_format == "fp8")
            points = [("prefill", PREFILL, prefill, ())]
            points += [("decode", batch, decode, (batch,)) for batch in BATCHES]
            for phase, size, work, args in points:
                done = [measure(model, e, work, *args) for e in IMPLEMENTATIONS[phase]]
                ours = done[-1].get("logits")
                for row in done:
                    logits = row.pop("logits", None)
                    if logits is not None and ours is not None:
                        row["apart"] = round(float((logits - ours).norm() / ours.norm()), 4)
                    point = {"model": name, "format": experts_format, "phase": phase, "size": size}
                    yield point | row
            del model
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu = conditions(torch.cuda.get_device_name(), "python " + " ".join(sys.argv))
    lines = []
    for row in rows():
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        lines.append(json.dumps({"bench": "transformers"} | row | gpu) + "\n")
    if options.out is not None:
        options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
