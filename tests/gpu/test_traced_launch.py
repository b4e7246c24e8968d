"""Traces of real launches: the same result, every tile, and times that can be."""

import json
from collections import Counter

import numpy as np
import pytest
from tiles import num_blocks

import jitmoe
from jitmoe.plan.heuristics import choose
from jitmoe.run.driver import device_spec
from jitmoe.tracing.events import is_wait, task_fields

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 16, 4
CASES = [  # bucket, tokens, format
    ("decode", 48, "fp8_block"),
    ("prefill", 2048, "fp8_block"),
    ("decode", 48, "mxfp4_fp8"),
    ("prefill", 2048, "mxfp4_fp8"),
    ("decode", 48, "mxfp4_bf16"),
    ("prefill", 2048, "mxfp4_bf16"),
]


@pytest.fixture(params=CASES, ids=str)
def call(request, make_layer, make_call):
    bucket, num_tokens, format = request.param
    layer = make_layer(EXPERTS, HIDDEN, INTERMEDIATE, format=format)
    made = make_call(layer, num_tokens, TOP_K)
    plan = choose(made.layer.weights.problem(num_tokens, TOP_K), device_spec(0))
    assert plan.bucket == bucket
    return made, plan


def x_of(call):
    return call.bf16 if call.scale is None else call.fp8


def traced(call, out):
    tokens = call.tokens
    arguments = x_of(call), tokens.topk_ids, tokens.topk_weights, call.layer.weights
    return jitmoe.trace(*arguments, out=out)


def test_same_result_every_tile_sane_times(call, workspace, tmp_path):
    import cupy

    call, plan = call
    y = cupy.full(call.tokens.x.shape, 0xFFFF, cupy.uint16)
    trace = traced(call, y)
    assert bool((y == call.run(x_of(call), workspace)).all())

    assert trace.unit == "ns" and trace.num_lost == 0
    assert 2_000 < trace.duration < 50_000_000, "a launch takes microseconds to milliseconds"
    events = trace.events
    assert (events["begin_ns"] <= events["end_ns"]).all() and events["begin_ns"].min() == 0
    assert set(events["block"].tolist()) == set(range(device_spec(0).num_sms))
    heads = trace.select("head")
    num_warps = sum(r.num_warps // (4 if r.num_warps >= 4 else 1) for r in plan.roles)
    assert len(heads) == device_spec(0).num_sms * num_warps

    counts = np.bincount(call.tokens.topk_ids.get().ravel(), minlength=EXPERTS)
    num_tasks = sum(num_blocks(plan, int(n)) for n in counts) * (
        plan.num_tiles_1 + plan.num_tiles_2
    )
    for role in plan.roles:
        fields = task_fields(trace.select("task", role.name)["payload"])
        covered = Counter(zip(*(values.tolist() for values in fields.values()), strict=True))
        assert len(covered) == num_tasks, role.name
        # The first warp of a warpgroup of one role stamps for all four.
        num_warps = role.num_warps // (4 if role.num_warps >= 4 else 1)
        assert set(covered.values()) == {num_warps}, role.name

    # Nothing of the second GEMM begins before something of the first has ended.
    mma, epilogue = trace.select("mma"), trace.select("epilogue")
    assert len(mma) == len(epilogue) > 0
    first_2 = mma["begin_ns"][mma["payload"] == 1].min()
    assert first_2 > mma["end_ns"][mma["payload"] == 0].min()

    summary = trace.summary()
    assert 1 <= summary.resolution <= 2_000, "the clock's step, in ns"
    assert 0 < summary.first_mma < summary.duration and 0 <= summary.tail < summary.duration
    assert all(0 < busy <= 1.001 for busy in summary.busy.values())
    assert is_wait(events).any()
    trace.to_perfetto(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
