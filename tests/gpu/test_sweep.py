"""A sweep on a GPU: rows measured in another process, and a tuned plan that calls use."""

import cupy

import jitmoe
from jitmoe import measure, tune, tuned
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT
from jitmoe.planned import find_plan
from jitmoe.run.driver import device_spec

LAYER = MoeProblem(8, 1024, 512, 16, 4)


def test_sweep(tmp_path):
    store = tmp_path / "sweep.jsonl"
    rows = tune.sweep(LAYER, {"num_stages": (3, 4)}, store=store, rounds=1)
    assert [row["status"] for row in rows] == ["ok"] * len(rows) and len(rows) >= 2
    for row in rows:
        assert 0 < row["us_min"] <= row["us_median"] <= row["us_p90"]
        assert 0 < row["rel_error"] < 3e-2 and row["num_regs"] > 0 and row["spill_bytes"] == 0
        assert row["floor_us"] <= row["us_median"] and row["gpu"] and row["driver"]
    said = []
    assert tune.sweep(LAYER, {"num_stages": (3, 4)}, store=store, rounds=1, say=said.append) == rows
    assert said == [], "nothing was left to do"


def test_calls_use_the_tuned_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("JITMOE_TUNED", str(tmp_path / "tuned.json"))
    gpu = device_spec(cupy.cuda.Device().id)
    chosen = tuned.choose(LAYER, gpu, **DEFAULT.plan_fields)
    assert chosen.origin is None
    plan = {**tuned.plan_fields(chosen.plan), "num_stages": 3}
    where = tuned.gpu_name(gpu), gpu.num_sms
    layer = tuned.layer_fields(chosen.plan)
    entry = tuned.Entry(*where, layer, (5, 8), plan, {})
    tuned.write(tmp_path / "tuned.json", lambda entries: [*entries, entry])
    sets, experts = measure.weight_sets(LAYER)
    weights = sets[0]
    assert find_plan(weights, 8, LAYER.top_k, DEFAULT).num_stages == 3
    assert find_plan(weights, 9, LAYER.top_k, DEFAULT) == chosen.plan
    call = measure.random_call(LAYER, 0)
    y = call.launch(weights, jitmoe.Workspace(), measure.poisoned(LAYER))
    errors = measure.errors(y, measure.references(call, experts))
    assert errors.are_small(LAYER.format)
