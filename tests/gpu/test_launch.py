"""What lies below the layer: any plan's launch, and kernels that come from another machine."""

import os
import subprocess
import sys
from pathlib import Path

from jitmoe.jit import render, store
from jitmoe.jit.build import build_many
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.driver import device_spec
from jitmoe.run.launch import ParamBlock, load

TESTS = Path(__file__).parents[1]
RACE, NO_RACE = "p.factor * smem.rows[0][0]", "p.factor * p.x[lane_idx()] + p.last"


def test_a_kernel_of_a_few_lines(tmp_path, monkeypatch):
    """Render, compile, load, parameters, launch: if this fails, look no further."""
    import cupy

    monkeypatch.syspath_prepend(TESTS / "cpu")
    from tiny_plan import ROOM, TinyPlan, make_templates

    assert RACE in ROOM
    templates = make_templates(tmp_path / "templates", ROOM.replace(RACE, NO_RACE))
    monkeypatch.setattr(render, "templates_dir", lambda: templates)
    plan = TinyPlan("sm_90a")
    x, y = cupy.arange(256, dtype=cupy.float32), cupy.zeros(256, cupy.float32)
    params = ParamBlock(plan)
    params.write_maps(bytes(128))
    params.write(x.data.ptr, 1, y.data.ptr, 2.5, -1, -7)
    device, stream = cupy.cuda.Device().id, cupy.cuda.get_current_stream()
    load(plan, device).launch(params, stream.ptr, cooperative=True, grid=1)
    stream.synchronize()
    assert (y[:32] == 2.5 * x[:32] - 7).all() and not y[32:].any()


FIRST_CALLS = """
import sys

import cupy

from jitmoe import ExpertWeights, mega_moe, reference
from jitmoe.fp8 import encode_bf16
from jitmoe.jit import build, store

compiled = []
build.compile_listeners.append(lambda built, reason: compiled.append(built.name))
assert store.import_(sys.argv[1]) == 2
layer = reference.random_layer(11, 256, 144, seed=0, xp=cupy)
weights = ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)
for num_tokens in (4, 2000):
    tokens = reference.random_tokens(num_tokens, 256, 11, 2, seed=1, xp=cupy)
    y = mega_moe(encode_bf16(tokens.x, cupy), tokens.topk_ids, tokens.topk_weights, weights)
    ref = reference.mega_moe(tokens.x, None, *tokens[1:], *layer, requantize=True, xp=cupy)
    assert reference.relative_error(y.view(cupy.uint16), ref, cupy) < 1e-2
print("compiled", len(compiled))
"""


def test_kernels_of_another_machine(tmp_path, monkeypatch):
    """Built and exported without a GPU, imported here: the first calls compile nothing."""
    monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path / "there"))
    gpu = device_spec(0)
    plans = plans_of_model(MoeProblem(0, 256, 144, 11, 2), gpu).values()
    assert all(outcome.built for outcome in build_many(plans))
    assert store.export(tmp_path / "pack.tar.gz") == 2
    result = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS, tmp_path / "pack.tar.gz"],
        cwd=TESTS.parent,
        env=os.environ | {"JITMOE_CACHE_DIR": str(tmp_path / "here")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["compiled", "0"]
