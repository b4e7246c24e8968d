"""Peers on a CPU: their pipelines with the real steps, interpreted, against the oracle."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jitmoe import peers, reference
from jitmoe.fp8 import quantize_tokens

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 384, 208, 6, 3
MODULES = list(peers.peers())


@pytest.mark.parametrize("module", MODULES, ids=peers.FILES)
def test_every_peer_has_the_three_names(module):
    assert module.PEER.max_error < 0.1 and callable(module.prepare)
    reason = module.available()
    assert reason is None or (reason and "\n" not in reason)


def test_reasons(monkeypatch):
    for package in ("torch", "transformers", "deep_gemm"):
        monkeypatch.setitem(sys.modules, package, None)
    for module in list(sys.modules):
        if module.startswith("transformers."):
            monkeypatch.setitem(sys.modules, module, None)
    for module in MODULES:
        assert module.available().startswith("not importable")


@pytest.mark.parametrize("file", [file for file in peers.FILES if "grouped_mm" in file])
def test_pipeline_gives_the_layer(file):
    """In a process of its own: Triton interprets all of its functions or none."""
    if reason := importlib.import_module(f"jitmoe.peers.{file}").available():
        pytest.skip(reason)
    code = f"import test_peers; test_peers.check_pipeline({file!r})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def scaled_grouped_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, offs, **options):
    """What torch's needs a GPU for: b [experts, k, n], offs the ends of a's groups."""
    import torch

    assert recipe_a is recipe_b and options["output_dtype"] is torch.bfloat16
    out = torch.full((len(a), b.shape[2]), float("nan"))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        rows = a[start:end].float() * scale_a[start:end, None]
        out[start:end] = rows @ (b[expert].float() * scale_b[expert])
        start = end
    return out.to(torch.bfloat16)


def check_pipeline(file):
    import torch

    torch.nn.functional.scaled_grouped_mm = scaled_grouped_mm
    module = importlib.import_module(f"jitmoe.peers.{file}")
    layer = reference.random_layer(NUM_EXPERTS, HIDDEN, INTERMEDIATE, seed=1)

    def e4m3(codes):
        return torch.from_numpy(codes).view(torch.float8_e4m3fn)

    w13_scale, w2_scale = map(torch.from_numpy, (layer.w13_scale, layer.w2_scale))
    call = module.prepare(reference.Layer(e4m3(layer.w13), w13_scale, e4m3(layer.w2), w2_scale))
    for routing in ("uniform", "unused", "one_expert"):
        tokens = reference.random_tokens(12, HIDDEN, NUM_EXPERTS, TOP_K, seed=2, routing=routing)
        x, x_scale = quantize_tokens(tokens.x)
        ids = np.where(tokens.topk_ids < NUM_EXPERTS, tokens.topk_ids, -1).astype(np.int32)
        y = call(e4m3(x), *map(torch.from_numpy, (x_scale, ids, tokens.topk_weights)))
        ref = reference.mega_moe(x, x_scale, ids, tokens.topk_weights, *layer, requantize=False)
        error = reference.relative_error(y.float().numpy(), ref)
        assert y.dtype is torch.bfloat16
        # Interpreted, a rounding to bf16 truncates and one to e4m3 can lose its carry.
        assert module.PEER.max_error / 10 < error <= 2 * module.PEER.max_error, (routing, error)
