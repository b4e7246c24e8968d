"""Traces of emulated launches, what is made of them, and that an untraced kernel pays nothing."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiles import num_blocks
from typer.testing import CliRunner

import jitmoe
from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.jit import nvrtc
from jitmoe.jit.render import render, templates_dir
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.problem import MoeProblem
from jitmoe.tracing.events import CODES, EVENTS, WAIT, decode, is_wait, task_fields
from jitmoe.tracing.trace import Trace

GPU = gpu_spec("h200")
SMALL = MoeProblem(0, 512, 256, 8, 2)  # of `jitmoe trace`
NUM_TOKENS = {"decode": 40, "prefill": 300}
KERNELS = [("decode", "fp8_block"), ("prefill", "fp8_block"), ("prefill", "mxfp4_fp8")]


class Traced:
    """A launch and its trace; `untraced` is y of the kernel without stamps."""

    def __init__(self, bucket, format):
        plan = plans_of_model(replace(SMALL, format=format), GPU)[bucket]
        self.plan = replace(plan, trace=True)
        sizes = SMALL.num_experts, SMALL.hidden, SMALL.intermediate
        self.layer = reference.random_layer(*sizes, 0, format=format)
        num_tokens = NUM_TOKENS[bucket]
        self.tokens = reference.random_tokens(
            num_tokens, SMALL.hidden, SMALL.num_experts, SMALL.top_k, 1
        )
        self.call = fp8.encode_bf16(self.tokens.x), *self.tokens[1:]
        self.untraced = EmulatedLayer(plan, self.layer, num_tokens)(*self.call)
        emulated = EmulatedLayer(self.plan, self.layer, num_tokens)
        self.y = emulated(*self.call)
        self.rings = emulated.rings
        self.trace = Trace(**vars(decode(self.rings, self.plan, "steps")))


@pytest.fixture(scope="module", params=KERNELS, ids="-".join)
def traced(request):
    try:
        compiler()
    except NoHostCompiler as error:
        pytest.skip(str(error))
    return Traced(*request.param)


def test_the_result_is_the_same(traced):
    assert np.array_equal(traced.y, traced.untraced)


def test_the_call_and_its_output(traced):
    layer, out = traced.layer, np.empty_like(traced.y)
    said = traced.plan.format if traced.plan.is_mx else None
    scales = layer.w13_scale, layer.w2_scale
    weights = jitmoe.ExpertWeights(layer.w13, layer.w2, *scales, format=said)
    trace = jitmoe.trace(*traced.call, weights, out=out, backend="emulated")
    assert np.array_equal(out, traced.y)
    assert np.array_equal(trace.events, traced.trace.events)


def test_events_of_a_warp_nest_and_are_ordered(traced):
    num_events, steps = 0, [CODES[name] for name in ("mma", "epilogue", "combine")]
    for ring in traced.rings.reshape(-1, traced.plan.trace_capacity, 4):
        stamps = ring[ring[:, 1] != 0]
        assert np.array_equal(stamps[:, 1] >> 8, np.arange(len(stamps)))
        assert (np.diff(stamps[:, 0].astype(np.int64)) >= 0).all()
        stack = []
        for time, what, _, end in stamps.tolist():
            is_step = what & 63 in steps
            if stack and stack[-1] in steps and (is_step or what & 128):
                stack.pop()  # a step ends where the next begins or the task ends
            num_events += is_step or what & 192 != 0
            if what & 128:
                assert stack.pop() == what & 63
            elif what & 64:
                assert what & 63 not in stack and time <= end
            else:
                assert what & 63 not in stack
                stack.append(what & 63)
        assert not stack
    events = traced.trace.events
    assert len(events) == num_events and traced.trace.num_lost == 0
    assert (events["begin_ns"] <= events["end_ns"]).all() and events["begin_ns"].min() == 0
    depths = {"head": {0}, "task": {0}, "mma": {1}, "epilogue": {1}, "combine": {1}}
    for name, allowed in depths.items():
        assert set(traced.trace.select(name)["depth"].tolist()) == allowed, name


def test_every_stamping_warp_has_a_head(traced):
    heads = traced.trace.select("head")
    # The first warp of a warpgroup of one role stamps for all four.
    num_warps = sum(r.num_warps // (4 if r.num_warps >= 4 else 1) for r in traced.plan.roles)
    assert len(heads) == 4 * num_warps == len(np.unique(heads[["block", "warp"]]))


def test_tasks_cover_each_tile_once(traced):
    plan, counts = traced.plan, np.bincount(traced.tokens.topk_ids.ravel(), minlength=8)
    blocks = [e for e, n in enumerate(counts) for _ in range(num_blocks(plan, n))]
    wanted = {
        (phase, expert, tile, block)
        for block, expert in enumerate(blocks)
        for phase, tiles in enumerate((plan.num_tiles_1, plan.num_tiles_2))
        for tile in range(tiles)
    }
    for role in plan.roles:
        tasks = traced.trace.select("task", role.name)
        fields = [values.tolist() for values in task_fields(tasks["payload"]).values()]
        covered = Counter(zip(*fields, strict=True))
        assert set(covered) == wanted, role.name
        # The first warp of a warpgroup of one role stamps for all four.
        num_warps = role.num_warps // (4 if role.num_warps >= 4 else 1)
        assert set(covered.values()) == {num_warps}, role.name
    # A math warp without tokens of its own multiplies nothing.
    mma, epilogue = traced.trace.select("mma"), traced.trace.select("epilogue")
    assert 0 < len(mma) == len(epilogue) <= 2 * len(wanted)
    if not plan.split_tokens:
        assert len(mma) == 2 * len(wanted)
    assert set(mma["payload"].tolist()) == {0, 1}


def test_waits_are_named(traced):
    waits = traced.trace.events[is_wait(traced.trace.events)]
    names = {EVENTS[code] for code in waits["event"].tolist()}
    assert {"wait stage empty", "wait task full", "wait task empty"} <= names
    assert ("wait grid barrier" if traced.plan.split_tokens else "wait stage full") in names
    assert ("wait taken" in names) == traced.plan.expands
    stages = traced.trace.select("wait stage empty")["payload"]
    assert stages.max() < traced.plan.num_stages


def test_summary(traced):
    summary = traced.trace.summary()
    assert summary.duration == traced.trace.duration > summary.first_mma > 0
    assert set(summary.busy) == {role.name for role in traced.plan.roles}
    assert all(0 < busy <= 1 for busy in summary.busy.values())
    assert 0 < summary.mma < summary.busy["math"]
    assert 0 < summary.tail < summary.duration and summary.num_blocks == 4
    for role, waits in summary.waits.items():
        assert summary.busy[role] + sum(waits.values()) / summary.duration <= 1, role
    room = "taken" if traced.plan.expands else "stage empty"
    assert room in summary.waits["load"]


def test_perfetto(traced, tmp_path):
    traced.trace.to_perfetto(tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [record for record in records if record["ph"] == "X"]
    assert len(spans) == len(traced.trace.events)
    assert {"head", "GEMM 1", "GEMM 2", "mma", "combine", "wait task full"} <= {
        span["name"] for span in spans
    }
    threads = {r["args"]["name"] for r in records if r["name"] == "thread_name"}
    num_warps = sum(r.num_warps // (4 if r.num_warps >= 4 else 1) for r in traced.plan.roles)
    assert {"load 0", "schedule 1", "math 8"} <= threads and len(threads) == num_warps
    task = next(span for span in spans if span["name"] == "GEMM 2")
    assert set(task["args"]) == {"expert", "tile", "block"}


def test_plot(traced, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is in the trace extra")
    traced.trace.plot(tmp_path / "gantt.png", block=3)
    assert (tmp_path / "gantt.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="one of the 4 of the trace, 0 to 3, got 4"):
        traced.trace.plot(tmp_path / "none.png", block=4)


def test_plot_without_matplotlib(traced, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"jitmoe\[trace\]"):
        traced.trace.plot(tmp_path / "gantt.png")


def test_a_picture_is_refused_before_anything_runs(tmp_path, monkeypatch):
    from jitmoe import cli_trace
    from jitmoe.cli import app

    monkeypatch.setattr(cli_trace, "find_spec", lambda name: None)
    command = ["trace", "--emulated", "--out", str(tmp_path / "t.json"), "--png", "gantt.png"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "jitmoe[trace]" in result.stderr
    assert not (tmp_path / "t.json").exists()


def ring(*stamps, capacity=8):
    """Rings of one block, with stamps (time, number, event) in that of the first warp."""
    plan = replace(plans_of_model(SMALL, GPU)["decode"], trace=True)
    rings = np.zeros((1, plan.num_threads // 32, capacity, 4), np.uint32)
    for time, number, event in stamps:
        high = time + 4 if event & 64 else 6
        rings[0, 0, number % capacity] = time % 2**32, number << 8 | event, 5, high % 2**32
    return rings, plan


def test_a_full_ring_keeps_the_newest():
    task, wait = CODES["task"], CODES["wait stage empty"]
    # Of the first task only the last wait and the end are left.
    stamps = [(6, 2, wait | 64), (11, 3, task | 128), (20, 4, task), (21, 5, wait | 64)]
    stamps += [(26, 6, wait | 64), (31, 7, task | 128), (40, 8, task), (50, 9, task | 128)]
    timeline = decode(*ring(*stamps))
    assert timeline.num_lost == 2
    fields = ["event", "depth", "payload", "begin_ns", "end_ns"]
    payload = 6 << 32 | 5
    assert timeline.events[fields].tolist() == [
        (wait, 1, 5, 0, 4),
        (task, 0, payload, 14, 25),
        (wait, 1, 5, 15, 19),
        (wait, 1, 5, 20, 24),
        (task, 0, payload, 34, 44),
    ]


def test_a_step_ends_where_the_next_begins_or_the_task_ends():
    task, mma, epilogue = CODES["task"], CODES["mma"], CODES["epilogue"]
    wait = CODES["wait stage full"] | 64
    codes = [task, mma, wait, epilogue, task | 128, task, task | 128, task, epilogue, task | 128]
    stamps = [(10 * i, i, code) for i, code in enumerate(codes)]
    timeline = decode(*ring(*stamps, capacity=16))
    assert timeline.num_lost == 0
    assert timeline.events[["event", "depth", "begin_ns", "end_ns"]].tolist() == [
        (task, 0, 0, 40),
        (mma, 1, 10, 30),
        (wait & 63, 2, 20, 24),
        (epilogue, 1, 30, 40),
        (task, 0, 50, 60),
        (task, 0, 70, 90),
        (epilogue, 1, 80, 90),
    ]


def test_the_clock_may_wrap():
    head = CODES["head"]
    timeline = decode(*ring((2**32 - 5, 0, head), (2**32 + 7, 1, head | 128)))
    assert timeline.events[["begin_ns", "end_ns"]].tolist() == [(0, 12)]
    with pytest.raises(ValueError, match="must hold a main loop"):
        Trace(**vars(timeline)).summary()


def test_events_have_the_kernels_numbers():
    def numbers(file, name):
        body = re.search(rf"enum {name} : u32 {{(.*?)}};", (device / file).read_text(), re.S)[1]
        found = re.findall(rf"k{name}(\w+) = (\d+),", body)
        return {int(n): " ".join(re.findall("[A-Z][a-z]*", word)).lower() for word, n in found}

    device = templates_dir() / "device"
    events = numbers("events.cuh", "Event")
    assert events.pop(WAIT) == "wait"
    waits = {WAIT + n: f"wait {name}" for n, name in numbers("check.cuh", "Wait").items()}
    assert events | waits == EVENTS and max(EVENTS) < 64, "bits 6 and 7 of a stamp say what it is"


def test_an_untraced_kernel_has_no_trace(tmp_path):
    """Its text holds neither clock nor ring, and compiles to what it would without the calls."""
    plan = plans_of_model(MoeProblem(0, 7168, 2048, 32, 8), GPU)["decode"]
    text = render(plan)
    assert not re.search(r"trace_rings|globaltimer_lo|p\.trace|kTraceCapacity", text)
    bare = re.sub(r"// ==== device/(events|no_stamps).cuh ====.*?(?=// ====)", "", text, flags=re.S)
    bare = bare.replace("kTrace ? test_wait(barrier, parity) : poll()", "poll()")
    bare = re.sub(r"const (bool is_event = |u32 begin = .*trace_time).*", "", bare)
    bare = re.sub(r".*\b(trace_(begin|end|whole|task)|start_trace)\(.*;\n", "", bare)
    bare = bare.replace("DEVICE void trace_task(const Params& p, const Task& task) {\n}\n", "")
    bare = re.sub(r".*if constexpr \(kTrace\).*\n", "", bare)
    assert "kEvent" in text and "kEvent" not in bare
    codes = [nvrtc.compile(t, plan.arch, "kernel.cu").data for t in (text, bare)]
    assert codes[0] == codes[1]


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
@pytest.mark.parametrize("format", ["fp8_block", "bf16"])
@pytest.mark.parametrize(
    "sizes", [(7168, 2048, 32, 8), (2048, 768, 128, 8), (2048, 768, 16, 4), (4096, 14336, 8, 2)]
)
def test_traced_kernels_compile_clean(sizes, format, bucket):
    problem = MoeProblem(0, *sizes, format)
    plan = replace(plans_of_model(problem, GPU)[bucket], trace=True)
    plan.check(GPU)
    cubin = nvrtc.compile(render(plan), plan.arch, "kernel.cu")
    cubin.resources.check(plan, cubin.log)


def test_refusals():
    layer = reference.random_layer(8, 128, 16, 0)
    weights = jitmoe.ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)
    x = np.zeros((0, 128), np.uint16)
    ids, router = np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)
    with pytest.raises(ValueError, match="must have tokens for a trace"):
        jitmoe.trace(x, ids, router, weights, backend="emulated")
    with pytest.raises(ValueError, match="stream must be None"):
        jitmoe.trace(x, ids, router, weights, backend="emulated", stream=0)


def test_command_line(tmp_path, traced):
    from jitmoe.cli import app

    out = tmp_path / "trace.json"
    command = ["trace", "--emulated", "--json", "--out", str(out)]
    command += ["--tokens", str(NUM_TOKENS[traced.plan.bucket])]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["unit"] == "steps" and report["num_blocks"] == 4
    assert json.loads(out.read_text())["traceEvents"]
