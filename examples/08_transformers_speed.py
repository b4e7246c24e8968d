"""Tokens a second of models of transformers, built-in experts beside ours: prefill and decode.

    python examples/08_transformers_speed.py [--model gpt-oss-20b ...] [--out speed.jsonl]

Widths are the models' own, layers are few and weights random, so nothing is downloaded. Eager, as
`generate()` runs a model: the host's time counts. Each model has a process of its own, so that one
that fails does not end the others. Needs the transformers extra and a Hopper GPU; without them it
says so and stops.
"""

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
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

SMALL = {"vocab_size": 8192, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# What a model is called, its configuration, and the formats of experts that it can have.
MODELS = {
    "qwen3-30b-a3b": (
        "Qwen3-30B-A3B, 4 layers",
        partial(
            transformers.Qwen3MoeConfig,
            **SMALL,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_hidden_layers=4,
        ),
        ("bf16", "fp8"),
    ),
    "mixtral-8x7b": (
        "Mixtral-8x7B, 2 layers",
        partial(transformers.MixtralConfig, **SMALL, num_hidden_layers=2),
        ("bf16", "fp8"),
    ),
    "gpt-oss-20b": (
        "gpt-oss-20b, 4 layers",
        partial(transformers.GptOssConfig, **SMALL, num_local_experts=32, num_hidden_layers=4),
        ("bf16",),
    ),
    "glm-4.5-air": (
        "GLM-4.5-Air, 4 layers",
        partial(transformers.Glm4MoeConfig, **SMALL, num_hidden_layers=4, first_k_dense_replace=0),
        ("bf16", "fp8"),
    ),
    "deepseek-v3": (
        "DeepSeek-V3, 1 layer",
        partial(
            transformers.DeepseekV3Config, **SMALL, num_hidden_layers=1, first_k_dense_replace=0
        ),
        ("bf16", "fp8"),
    ),
}
USUAL = ("qwen3-30b-a3b", "mixtral-8x7b")
# Ours is last: it lays the weights of gpt-oss out anew, and the others get them as they are loaded.
# Other models are measured twice in this order, and the better median counts: decode is bound by
# the host, and what ran first on it matters.
IMPLEMENTATIONS = ("batched_mm", "grouped_mm", "jitmoe")
PREFILL, PROMPT, BATCHES = 2048, 64, (1, 8, 64)
WARMUPS, STEPS = 6, 24
DEVICE, BACKEND = "cuda", "cuda"


def build(config, is_fp8: bool):
    """The model on the GPU; FP8 experts have codes from N(0, 1) and one scale for all blocks."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if is_fp8:
        linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
        replace_with_fp8_linear(
            model,
            modules_to_not_convert=linear,
            quantization_config=transformers.FineGrainedFP8Config(),
        )
        for experts in (m for m in model.modules() if hasattr(m, "is_transposed")):
            fill(experts)
    return model.eval()


def fill(experts) -> None:
    """Give values to parameters that have none yet, an expert at a time: f32 is large."""
    for name, empty in experts.named_parameters():
        value = torch.empty(empty.shape, dtype=empty.dtype, device=DEVICE)
        for part in value:
            is_scale = "scale" in name
            part.copy_(
                torch.full(part.shape, 0.02) if is_scale else torch.randn(part.shape, device=DEVICE)
            )
        setattr(experts, name, torch.nn.Parameter(value, requires_grad=False))


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
    prompt = torch.arange(PREFILL, device=DEVICE)[None] % 8192
    logits = model(prompt, logits_to_keep=1).logits
    ms = milliseconds(lambda: model(prompt, logits_to_keep=1))
    return PREFILL / ms * 1e3, logits.float()


def decode(model, batch: int):
    """(tokens a second, logits of the first token after a prompt)."""
    prompt = torch.arange(batch * PROMPT, device=DEVICE).view(batch, PROMPT) % 8192
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    token = prompt[:, :1]
    logits = model(token, past_key_values=cache, use_cache=True).logits.float()
    ms = milliseconds(lambda: model(token, past_key_values=cache, use_cache=True))
    return batch / ms * 1e3, logits


def measure(model, experts: str, work, *args) -> dict:
    model.set_experts_implementation(experts)
    try:
        per_second, logits = work(model, *args)
    except Exception as error:  # an implementation that needs what is not installed, or more memory
        return {"experts": experts, "refused": sentence(error)}
    return {"experts": experts, "tokens_per_s": round(per_second), "logits": logits}


def sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


@torch.no_grad()
def rows_of(name: str, config, experts_format: str):
    """Rows of a model in a format, each implementation at every point before the next."""
    model = build(config, experts_format == "fp8")
    points = [("prefill", PREFILL, prefill, ())]
    points += [("decode", batch, decode, (batch,)) for batch in BATCHES]
    done = {}
    for experts in IMPLEMENTATIONS * (1 if config.model_type == "gpt_oss" else 2):
        for phase, size, work, args in points:
            if (phase, experts) != ("prefill", "batched_mm"):  # it copies a token's experts
                row, key = measure(model, experts, work, *args), (phase, size, experts)
                if key not in done or row.get("tokens_per_s", 0) > done[key].get("tokens_per_s", 0):
                    done[key] = row
                torch.cuda.empty_cache()
    ours = {key[:2]: row.get("logits") for key, row in done.items() if key[2] == "jitmoe"}
    for phase, size, *_ in points:
        for row in (row for key, row in done.items() if key[:2] == (phase, size)):
            logits = row.pop("logits", None)
            if logits is not None and ours[phase, size] is not None:
                distance = (logits - ours[phase, size]).norm() / ours[phase, size].norm()
                row["apart"] = round(float(distance), 4)
            yield {"model": name, "format": experts_format, "phase": phase, "size": size} | row


def rows(models):
    """Of all models; a row that says why where one could not be built."""
    register(BACKEND)
    for name, config, formats in models:
        for experts_format in formats:
            try:
                yield from rows_of(name, config(), experts_format)
            except Exception as error:  # the next one may do
                yield {"model": name, "format": experts_format, "failed": sentence(error)}
            torch.cuda.empty_cache()


def measure_here(name: str, out: Path | None) -> bool:
    """Measure a model and print its rows. Returns whether it could be built."""
    gpu = conditions(torch.cuda.get_device_name(), "python " + " ".join(sys.argv))
    has_failed = False
    for row in rows([MODELS[name]]):
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        has_failed |= "failed" in row
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"bench": "transformers"} | row | gpu) + "\n")
    return not has_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=[*MODELS, "all"], help="again for more")
    parser.add_argument("--out", type=Path, help="a .jsonl file to append rows to")
    options = parser.parse_args()
    chosen = options.model or USUAL
    names = list(MODELS) if "all" in chosen else list(dict.fromkeys(chosen))
    if len(names) == 1:
        return 0 if measure_here(names[0], options.out) else 1
    failed = []
    for name in names:
        command = [sys.executable, sys.argv[0], "--model", name]
        command += [] if options.out is None else ["--out", str(options.out)]
        if subprocess.run(command).returncode:
            failed.append(name)
    if failed:
        print(f"failed, as said above: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
