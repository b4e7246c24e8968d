"""Sweeps: candidates, rows of what goes well and wrong, resuming, the command. No GPU: a stand-in
measures.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from jitmoe import DriverError, tune, tuned
from jitmoe.bench.points import SHAPES
from jitmoe.cli import app
from jitmoe.jit.build import Outcome
from jitmoe.jit.nvrtc import CompileError
from jitmoe.measure import Errors
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT
from jitmoe.tune import on_gpu, sweeping
from jitmoe.tune.space import Candidate, candidates
from jitmoe.tune.store import Store
from jitmoe.tune.trial import KEY, Trial, key_of
from jitmoe.tune.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
H200 = GPUS["h200"]
FIELDS = DEFAULT.plan_fields
DECODE = MoeProblem(8, 2048, 768, 128, 8)
PREFILL = replace(DECODE, num_tokens=8192)
TIMES = ("time", "date")


@pytest.fixture
def no_builds(monkeypatch):
    """Every plan compiles, at no cost."""
    monkeypatch.setattr(sweeping, "build_many", lambda plans: [Outcome(plan) for plan in plans])


@pytest.fixture
def sweep(no_builds):
    def run(problems=DECODE, space=None, measurer="measure", **options):
        return tune.sweep(
            problems, space, gpu=H200, measurer=f"tune_measurer:{measurer}", **options
        )

    return run


def plain(rows):
    """Rows without when they were measured, in an order of their own."""
    kept = [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
    return sorted(kept, key=lambda row: str(key_of(row)))


# Candidates


@pytest.mark.parametrize("format", ["fp8_block", "bf16", "mxfp4_fp8", "mxfp4_bf16"])
@pytest.mark.parametrize("problem", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_candidates(problem, format):
    problem = replace(problem, format=format)
    found = candidates(problem, H200, **FIELDS)
    chosen = found[0].plan
    assert found[0].changes == "" and chosen == tuned.choose(problem, H200, **FIELDS).plan
    assert len(found) == len({one.plan for one in found}) > 5
    assert {one.plan.bucket for one in found} == {"decode", "prefill"}
    for one in found:
        tuned.checked(one.plan, H200)
        assert tuned.layer_fields(one.plan) == tuned.layer_fields(chosen)


def test_candidates_of_a_space():
    space = {"num_stages": (3, 4, 99), "num_task_slots": [2, 3], "bucket": ["decode", "prefill"]}
    found = candidates(PREFILL, H200, space, **FIELDS)
    tried = {(one.plan.bucket, one.plan.num_stages, one.plan.num_task_slots) for one in found[1:]}
    expected = {(b, n, m) for b in ("decode", "prefill") for n in (3, 4) for m in (2, 3)}
    assert found[0].plan.num_stages == found[0].plan.num_task_slots == 3  # of prefill
    assert tried == expected - {("prefill", 3, 3), ("prefill", 4, 3)}, "the latter does not fit"
    with pytest.raises(ValueError, match="space must have fields of bucket.*got hidden"):
        candidates(PREFILL, H200, {"hidden": [1]}, **FIELDS)
    with pytest.raises(ValueError, match="bucket must be decode or prefill, got 'both'"):
        candidates(PREFILL, H200, {"bucket": ["both"]}, **FIELDS)


@pytest.mark.parametrize(
    "space, words",
    [
        ([3], "space must be a mapping of plan fields to values, got [3]"),
        ({"num_stages": 3}, "num_stages of space must be a list of whole numbers, got 3"),
        ({"num_stages": "34"}, "num_stages of space must be a list of whole numbers, got '34'"),
        ({"num_stages": [3, "x"]}, "num_stages of space must be a list of whole numbers, got"),
        ({"unroll_k": [2.0]}, "unroll_k of space must be a list of whole numbers, got"),
        ({"bucket": "prefill"}, "bucket of space must be a list of buckets, got 'prefill'"),
        ({3: [3]}, "space must have fields of bucket"),
    ],
    ids=str,
)
def test_mistakes_of_a_space(space, words):
    with pytest.raises(ValueError) as error:
        candidates(DECODE, H200, space, **FIELDS)
    assert words in str(error.value)


def test_a_space_of_which_nothing_can_run_is_said():
    said = []
    [alone] = candidates(DECODE, H200, {"num_stages": [1, 99]}, say=said.append, **FIELDS)
    assert alone.changes == ""
    [text] = said
    assert text.startswith("none of the 2 plans of the space can run for 8 tokens of hidden 2,048")
    assert "got 1" in text
    found = candidates(DECODE, H200, {"num_stages": np.arange(4, 99)}, say=pytest.fail, **FIELDS)
    assert {type(one.plan.num_stages) for one in found} == {int} and len(found) > 1


def test_a_bucket_that_bits_depend_on_stays():
    problem = replace(PREFILL, format="mxfp4_fp8")
    found = candidates(problem, H200, **FIELDS | {"batch_invariant": True})
    assert {one.plan.bucket for one in found} == {"decode"}
    prefill = candidates(problem, H200, **FIELDS)[0].plan
    assert prefill.bucket == "prefill"
    with pytest.raises(PlanError, match="decode bucket alone"):
        tuned.checked(replace(prefill, batch_invariant=True), H200)


# Rows


def test_rows(sweep):
    rows = sweep([DECODE, PREFILL])
    first = [row for row in rows if row["round"] == 1]
    assert [row["num_tokens"] for row in first] == sorted(row["num_tokens"] for row in first)
    assert all(row["status"] == "ok" and row["shape"] == "S2" for row in rows)
    row = next(row for row in rows if row["changes"] == "num_local_pairs=512")
    assert (row["first_tokens"], row["last_tokens"]) == (5, 8)
    assert row["gain"] == pytest.approx(1 / 0.9 - 1, abs=1e-4) and row["noise"] < 0.01
    assert (row["us_median"], row["heuristic_us"]) == (90.05, 100.05)
    assert row["us_min"] <= row["us_median"] <= row["us_p90"]
    assert row["gbps"] == round(1.01e8 / 90.045 * 1e-3) and row["bound"] == "memory"
    assert row["of_floor"] == round(row["floor_us"] / row["us_median"], 3)
    assert row["gpu"] == "H200" and row["num_sms"] == 132 and row["versions"]["nvrtc"]
    json.dumps(rows, allow_nan=False)


def test_only_what_is_ahead_is_measured_again(sweep):
    rows = sweep([DECODE, PREFILL], rounds=3)
    again = [(row["num_tokens"], row["changes"], row["round"]) for row in rows if row["round"] > 1]
    assert again == [(8, change, n) for n in (2, 3) for change in ("", "num_local_pairs=512")]


def test_every_failure_is_a_row(sweep):
    rows = sweep(measurer="misbehave", limit_s=3, rounds=1)
    found = {row["changes"]: (row["status"], row["reason"]) for row in rows}
    assert found["num_stages=3"] == ("crashed", "the measuring process ended by signal 6")
    assert found["num_stages=4"] == ("hung", "no answer within 3 s")
    assert found["num_task_slots=2"] == ("failed", "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert found["num_task_slots=4"] == ("wrong", "off")
    assert sum(status != "ok" for status, _ in found.values()) == 4
    assert len(found) == len(candidates(DECODE, H200, **FIELDS))
    failed = next(row for row in rows if row["status"] == "failed")
    assert failed["us_median"] is None and failed.keys() == rows[0].keys()


def test_a_measuring_process_that_does_not_start_is_said(sweep):
    [row] = sweep(measurer="missing", space={}, rounds=1)
    assert row["status"] == "crashed" and "exit code 1" in row["reason"]
    assert "AttributeError" in row["reason"]


def test_a_plan_that_does_not_compile_is_a_row(sweep, monkeypatch):
    def build_many(plans):
        for plan in plans:
            error = CompileError("it spills", "log") if plan.num_stages == 4 else None
            yield Outcome(plan, error=error)

    monkeypatch.setattr(sweeping, "build_many", build_many)
    rows = sweep(space={"num_stages": (3, 4)}, rounds=1)
    assert [(row["changes"], row["status"], row["reason"]) for row in rows] == [
        ("", "ok", None),
        ("num_stages=3", "ok", None),
        ("num_stages=4", "failed", "CompileError: it spills"),
    ]


def test_kernels_are_built(tmp_path):
    """Really, before they are measured; rows say what the compiler said."""
    layer = MoeProblem(8, 256, 128, 4, 2)
    measurer = "tune_measurer:measure"
    rows = tune.sweep(layer, {"num_stages": [3]}, gpu=H200, measurer=measurer, rounds=1)
    assert [row["num_stages"] for row in rows] == [rows[0]["num_stages"], 3]
    cached = Path(os.environ["JITMOE_CACHE_DIR"])
    for row in rows:
        assert row["num_regs"] >= 100 and row["spill_bytes"] == 0 and row["compile_s"] > 0
        assert (cached / f"mega_moe-{row['kernel']}" / "kernel.cubin").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"problems": replace(DECODE, num_tokens=0)}, "must have tokens, got num_tokens 0"),
        ({"skew": "even"}, "skew must be one of uniform"),
        ({"problems": ["S1"]}, "problems must be of MoeProblem, got 'S1'"),
        ({"problems": replace(DECODE, num_experts=4)}, "needs top_k up to the 4 experts"),
        ({"store": "/nowhere/rows.jsonl"}, "store must lie in an existing folder"),
    ],
)
def test_mistakes(changes, words, sweep):
    with pytest.raises(ValueError, match=words):
        sweep(**changes)


# The measurer of GPUs, with a GPU that is not there


class Bench:
    """Stands for the modules that need one: each call is a line of `log`."""

    def __init__(self, monkeypatch, us, errors=(0.02, 4e-3, 0.1), is_poisoned=False):
        self.log, self.us = [], us
        stream = SimpleNamespace(synchronize=lambda: None)

        def of_jitmoe(layer, calls, weights, plan):
            self.log.append(("method", plan.num_stages))
            name = plan.num_stages, sum(one[0] == "method" for one in self.log)
            capture = lambda: (name, ["y"] * len(calls))  # noqa: E731
            check = lambda: self.log.append(("check", name[0]))  # noqa: E731
            return SimpleNamespace(
                stream=stream, num_calls=len(calls), call=str, capture=capture, check=check
            )

        def burst(launch, stream, num_replays):
            self.log.append(("burst", launch[0]))
            return self.us[launch[0]] * 8  # of a graph of 8 calls

        def made(name, value):
            return lambda *args, **options: self.log.append((name, args[0].num_tokens)) or value

        ids = np.zeros((8, 8), np.int32)
        call = SimpleNamespace(topk_ids=ids)
        monkeypatch.setattr(on_gpu, "_kept", {})
        monkeypatch.setattr(on_gpu.methods, "of_jitmoe", of_jitmoe)
        monkeypatch.setattr(on_gpu.times, "burst", burst)
        monkeypatch.setattr(on_gpu.measure, "weight_sets", made("weights", (["w"], "experts")))
        monkeypatch.setattr(on_gpu.measure, "random_call", made("call", call))
        monkeypatch.setattr(on_gpu.measure, "references", lambda *_: self.log.append(("oracle", 0)))
        monkeypatch.setattr(on_gpu.measure, "errors", lambda *_: Errors(*errors))
        monkeypatch.setattr(on_gpu, "poison", lambda ys: self.log.append(("poison", 0)))
        monkeypatch.setattr(on_gpu, "is_poisoned", lambda ys: is_poisoned)
        monkeypatch.setattr(on_gpu, "free", lambda: None)
        cupy = SimpleNamespace(asnumpy=lambda array: array)
        monkeypatch.setitem(sys.modules, "cupy", cupy)

    def count(self, name):
        return sum(one[0] == name for one in self.log)


def trial_of(problem=DECODE, round=1, **changes):
    chosen = candidates(problem, H200, {}, **FIELDS)[0].plan
    plan = Candidate(replace(chosen, **changes), "")
    return Trial(problem, DEFAULT, "uniform", H200, plan, chosen, round)


def test_gpu_measurer(monkeypatch):
    """Bursts by turns, weights made once for a layer, calls and oracle once for a point."""
    bench = Bench(monkeypatch, {5: 100.0, 3: 80.0, 4: 110.0})
    outcome = on_gpu.measure_trial(trial_of(num_stages=3))
    assert outcome["status"] == "ok" and outcome["us_median"] == 80.0
    assert (outcome["gain"], outcome["noise"]) == (0.25, 0.0)
    assert (outcome["rel_error"], outcome["rel_error_requantized"]) == (0.02, 0.004)
    bursts = [plan for name, plan in bench.log if name == "burst"][4:]
    assert bursts == [5, 3, 3, 5] * (on_gpu.NUM_PAIRS // 2)
    assert bench.log.index(("poison", 0)) < bench.log.index(("burst", 5)), (
        "checked is what it timed"
    )
    on_gpu.measure_trial(trial_of(num_stages=4))
    assert (bench.count("weights"), bench.count("oracle"), bench.count("call")) == (1, 1, 8)
    assert [plan for name, plan in bench.log if name == "method"] == [3, 5, 4]
    on_gpu.measure_trial(trial_of(round=2, num_stages=4))
    on_gpu.measure_trial(trial_of(replace(DECODE, num_tokens=16), num_stages=4))
    assert (bench.count("weights"), bench.count("oracle")) == (1, 3)
    assert ("weights", 0) in bench.log and ("call", 16) in bench.log
    on_gpu.measure_trial(trial_of(replace(DECODE, hidden=1024), num_stages=4))
    assert bench.count("weights") == 2


@pytest.mark.parametrize(
    "options, reason, timed",
    [
        ({"errors": (0.04, 0.1, 0.1)}, "allowed is a relative error of 0.03", False),
        ({"errors": (float("nan"),) * 3}, "allowed is a relative error of 0.03", False),
        ({"is_poisoned": True}, "the graph left NaN in an output", True),
    ],
)
def test_gpu_measurer_of_a_wrong_plan(options, reason, timed, monkeypatch):
    bench = Bench(monkeypatch, {5: 100.0, 3: 80.0}, **options)
    outcome = on_gpu.measure_trial(trial_of(num_stages=3))
    assert (outcome["status"], outcome["reason"]) == ("wrong", reason)
    assert (bench.count("burst") > 0) == timed and "us_median" not in outcome
    json.dumps(outcome, allow_nan=False)


# Stopping and going on


def test_a_budget_of_nothing_is_no_endless_one(sweep):
    said = []
    assert sweep(budget_s=0, say=said.append) == []
    assert "the budget of 0 s is spent: 0 rows" in said[-1]


@pytest.mark.parametrize("how", ["interrupt", "budget"])
def test_a_sweep_that_is_stopped_goes_on(how, sweep, tmp_path, monkeypatch):
    whole = sweep(store=tmp_path / "whole.jsonl")
    store, said, ask, asked = tmp_path / "rows.jsonl", [], Worker.ask, []

    def stop(self, trial, limit_s):
        asked.append(trial)
        if how == "interrupt" and len(asked) > 3:
            raise KeyboardInterrupt
        if how == "budget":
            time.sleep(0.5)
        return ask(self, trial, limit_s)

    monkeypatch.setattr(Worker, "ask", stop)
    budget_s = 1.0 if how == "budget" else None
    rows = sweep(store=store, budget_s=budget_s, say=said.append)
    assert 0 < len(rows) < len(whole) and tune.load(store) == rows
    assert ("interrupted" if how == "interrupt" else "budget of 1 s is spent") in said[-1]
    monkeypatch.setattr(Worker, "ask", ask)
    assert plain(sweep(store=store)) == plain(whole)
    assert tune.load(store)[: len(rows)] == rows, "rows that were there stay"
    assert len(tune.load(store)) == len(whole), "none is measured twice"


PROGRAM = """
import sys
from dataclasses import replace
from jitmoe import tune
from jitmoe.jit.build import Outcome
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.problem import MoeProblem
from jitmoe.tune import sweeping

sweeping.build_many = lambda plans: [Outcome(plan) for plan in plans]
problems = [MoeProblem(n, 2048, 768, 128, 8) for n in (8, 8192)]
tune.sweep(problems, gpu=GPUS["h200"], measurer="tune_measurer:slowly", store=sys.argv[1])
"""


def test_killed_twice_and_resumed(tmp_path):
    """The same rows as those of a sweep that was left alone, and no process stays behind."""
    pids = tmp_path / "pids"
    pids.mkdir()
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "TUNE_PIDS": str(pids)}

    def start(store):
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, store], env=environment, stdout=subprocess.DEVNULL
        )

    store, whole = tmp_path / "rows.jsonl", tmp_path / "whole.jsonl"
    alone, counts = start(whole), []
    for more in (3, 4):
        process = start(store)
        wanted = sum(counts) + more
        while not store.exists() or store.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None, "ended early"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        counts.append(store.read_bytes().count(b"\n") - sum(counts))
        with store.open("ab") as file:
            file.write(b'{"bench": "tu')  # as a write that was cut off leaves it
    assert start(store).wait(120) == 0 and alone.wait(120) == 0
    rows = tune.load(store)
    assert plain(rows) == plain(tune.load(whole))
    assert len({key_of(row) for row in rows}) == len(rows) > sum(counts)
    deadline = time.monotonic() + 20
    while left := [pid for pid in os.listdir(pids) if is_running(int(pid))]:
        assert time.monotonic() < deadline, f"measuring processes {left} outlive their sweeps"
        time.sleep(0.1)


def test_interrupted_for_real(tmp_path):
    """By the signal of Ctrl-C: the sweep says so and returns, its measuring process is ended."""
    pids, store = tmp_path / "pids", tmp_path / "rows.jsonl"
    pids.mkdir()
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, store],
        env=os.environ | {"PYTHONPATH": paths, "TUNE_PIDS": str(pids)},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not store.exists() or store.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, "ended early"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    rows = tune.load(store)
    assert process.returncode == 0 and len(rows) >= 3
    assert f"interrupted: {len(rows)} rows are kept; call again to go on" in said
    assert not any(is_running(int(pid)) for pid in os.listdir(pids))


def test_a_measuring_process_ends_when_nobody_asks_any_more(no_builds):
    with Worker("tune_measurer:measure") as worker:
        assert worker.ask(trial_of(), 60)["status"] == "ok"
        process = worker._process
        worker._pipe.close()
        assert process.wait(20) == 0


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_another_kernel_is_measured_anew(sweep, tmp_path, monkeypatch):
    store = tmp_path / "rows.jsonl"
    rows = sweep(space={}, store=store, rounds=1)
    monkeypatch.setattr("jitmoe.tune.trial.render", lambda plan: "another text")
    assert sweep(space={}, store=store, rounds=1) != rows and len(tune.load(store)) == 2


def test_store(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = dict.fromkeys(KEY, 1) | {"status": "ok"}
    with Store(path) as store:
        store.append(row)
        with pytest.raises(ValueError, match="another sweep writes .*rows.jsonl; wait for it"):
            Store(path)
    with Store(path) as store:
        assert store.rows == [row]
    path.write_text(json.dumps(row) + "\n{]\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:2: not JSON"):
        Store(path)
    path.write_text('{"bench": "mega_moe"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no row of a sweep, it lacks gpu"):
        tune.load(path)
    assert path.read_text() == '{"bench": "mega_moe"}\n', "what is no store is left as it is"


@pytest.mark.parametrize(
    "text", ["my notes", '{"hidden_size": 7168}', '{"bench": "tu ', "3", "3\n"]
)
def test_a_file_of_something_else_is_no_store(text, tmp_path):
    path = tmp_path / "notes.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"notes.md:1: no.* take another file"):
        Store(path)
    assert path.read_text() == text


@pytest.mark.parametrize("length", [1, 9, 16, 40])
def test_a_row_that_was_cut_off_is_dropped(length, tmp_path):
    path, row = (
        tmp_path / "rows.jsonl",
        {"bench": "tune"} | dict.fromkeys(KEY, 1) | {"status": "ok"},
    )
    path.write_text(json.dumps(row) + "\n" + json.dumps(row)[:length])
    with Store(path) as store:
        assert store.rows == [row]
    assert path.read_text() == json.dumps(row) + "\n"


def test_a_row_that_lost_its_line_end_is_kept(tmp_path):
    path, row = (
        tmp_path / "rows.jsonl",
        {"bench": "tune"} | dict.fromkeys(KEY, 1) | {"status": "ok"},
    )
    path.write_text(json.dumps(row))
    with Store(path) as store:
        assert store.rows == [row]
        store.append(row)
    assert tune.load(path) == [row, row]


# The command


@pytest.fixture
def command(no_builds, monkeypatch):
    monkeypatch.setattr("jitmoe.cli_tune.gpu_to_measure", lambda name: H200)
    monkeypatch.setattr(sweeping, "ON_GPU", "tune_measurer:measure")
    monkeypatch.setattr(
        tune.sweep, "__kwdefaults__", tune.sweep.__kwdefaults__ | {"measurer": sweeping.ON_GPU}
    )

    def run(*args):
        return CliRunner().invoke(app, ["tune", *map(str, args)])

    return run


def test_command(command, tmp_path, monkeypatch):
    monkeypatch.setenv("JITMOE_TUNED", str(tmp_path / "site.json"))
    store = tmp_path / "rows.jsonl"
    shown = command("--shapes", "S2", "--tokens", "8,8192", "--store", store, "--save", "site")
    assert shown.exit_code == 0, shown.output
    assert "| S2 | 8 | 100.0 | 90.0 | +11.1% | +11.1% | num_local_pairs=512 | yes |" in shown.stdout
    assert "within 5% of the best at 1 of 2 points" in shown.stdout
    assert f"1 plans -> {tmp_path / 'site.json'}" in shown.stdout
    problem = replace(SHAPES["S2"], num_tokens=6)
    assert tuned.choose(problem, H200, **FIELDS).plan.num_local_pairs == 512
    again = command("--shapes", "S2", "--tokens", "8,8192", "--store", store, "--json")
    [point, other] = json.loads(again.stdout)
    assert point["kept"] and not other["kept"] and len(tune.load(store)) > 10


def test_command_of_a_space(command):
    shown = command("--shapes", "S2", "--tokens", 8, "--space", "num_stages=3 bucket=decode")
    assert shown.exit_code == 0 and "3 of 3" not in shown.stdout
    assert "round 1: 2 of 2 trials" in shown.stdout, shown.output


@pytest.mark.parametrize(
    "args, words",
    [
        (["--shapes", "S7"], "shapes must be of S1"),
        (["--shapes", "S1", "--model", "kimi-k2"], "name the layer in one way"),
        (["--tokens", "many"], "tokens must be positive integers"),
        (["--skew", "even"], "skew must be one of"),
        (["--space", "num_stages"], "space must be fields and values"),
        (["--space", "hidden=3"], "space must have fields of"),
        (["--save", "sight"], 'save must be "site" or a .json file, got'),
        (["--save", "site"], "there is no place for a site file"),
        (["--save", "damaged.json"], "damaged.json is damaged and not overwritten"),
        (["--save", "a.json", "--rounds", "1"], "--save needs two rounds, got 1"),
        (["--save", "a.json", "--skew", "zipf"], "--save needs uniform routing, got zipf"),
    ],
)
def test_mistakes_of_a_command(args, words, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("damaged.json").write_text("{")
    result = command(*args)
    assert result.exit_code == 2 and words in result.stderr
    assert "round 1" not in result.stdout, "nothing is measured that is lost then"
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.json"]


def test_a_sweep_without_a_gpu(monkeypatch):
    monkeypatch.setattr(sweeping, "num_devices", lambda: 0)
    with pytest.raises(DriverError, match="a sweep needs a GPU and finds none; .* jitmoe.tune.lo"):
        tune.sweep(DECODE)


def test_command_without_a_gpu(monkeypatch):
    monkeypatch.setattr("jitmoe.run.driver.num_devices", lambda: 0)
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 1 and "no GPU here; tune needs" in result.stderr
