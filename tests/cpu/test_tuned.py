"""Tuned plans: what rows prove, the file, and who uses it."""

import json
import logging
import multiprocessing
import os
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import jitmoe
from jitmoe import planned, prebuild, reference, tune, tuned, warming
from jitmoe.cli import app
from jitmoe.jit import cache
from jitmoe.jit.nvrtc import CompileError
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose, decode_limit, token_range
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT
from jitmoe.planned import find_plan, range_edges
from jitmoe.report import plan_report
from jitmoe.run.arrays import HOST
from jitmoe.tune.space import Candidate
from jitmoe.tune.trial import Trial, row_of

H200 = GPUS["h200"]
FIELDS = DEFAULT.plan_fields
SMALL = MoeProblem(8, 256, 144, 4, 2)  # decode up to 128 tokens


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """A site file, and a file in the package's place: neither is there yet."""
    monkeypatch.setenv("JITMOE_TUNED", str(tmp_path / "site.json"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setattr(cache, "_said", set())
    tuned.read.cache_clear()
    yield tmp_path / "site.json"
    tuned.read.cache_clear()


def changed(problem=SMALL, **changes):
    return replace(choose(problem, H200, **FIELDS), **changes)


def entry(problem=SMALL, tokens=(5, 8), gpu=H200, **changes):
    plan = changed(problem, **changes)
    place = tuned.gpu_name(gpu), gpu.num_sms
    return tuned.Entry(*place, tuned.layer_fields(plan), tokens, tuned.plan_fields(plan), {})


def put(path, *entries):
    tuned.write(path, lambda old: [*old, *entries])


def row(gain, round=1, noise=0.001, num_tokens=8, status="ok", skew="uniform", **changes):
    """Of a plan with `changes`, the heuristic's without any."""
    problem = replace(SMALL, num_tokens=num_tokens)
    chosen = choose(problem, H200, **FIELDS)
    words = " ".join(f"{name}={value}" for name, value in changes.items())
    candidate = Candidate(replace(chosen, **changes), words)
    trial = Trial(problem, DEFAULT, skew, H200, candidate, chosen, round)
    times = {"us_median": 100 / (1 + gain), "heuristic_us": 100.0, "gain": gain, "noise": noise}
    return row_of(trial, {"status": status} | times, None, {"date": "2026-11-30"})


def rows_of(*gains, **options):
    """Rounds of a plan with 3 stages beside the heuristic's."""
    options = {"num_stages": 3} | options
    return [
        one
        for n, gain in enumerate(gains, 1)
        for one in (row(0.0, n, 0.002, options.get("num_tokens", 8)), row(gain, n, **options))
    ]


# What rows prove


def test_a_win_on_two_occasions_is_kept():
    [winner] = tune.best(rows_of(0.05, 0.04))
    assert winner.tokens == (5, 8) and winner.plan["num_stages"] == 3
    assert winner.measured["gains"] == [0.05, 0.04] and winner.measured["num_tokens"] == [8]


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(0.05),
        rows_of(0.05, 0.005),
        rows_of(0.05, -0.02),
        rows_of(0.05, 0.04, -0.02),
        rows_of(0.05, 0.04, 0.005),
        rows_of(0.009, 0.009),
        rows_of(0.05, 0.04, noise=0.045),
        rows_of(0.05, 0.04, status="wrong"),
        rows_of(0.05, 0.04, skew="zipf"),
        [one for one in rows_of(0.05, 0.04) if not one["is_heuristic"]],
        [*rows_of(0.05, 0.04)[1:], row(0.06, 1)],
        [one | {"gain": 0.05 * one["is_heuristic"] or one["gain"]} for one in rows_of(0.05, 0.04)],
    ],
    ids=[
        "once",
        "not again",
        "behind again",
        "behind the third time",
        "level the third time",
        "less than 1 %",
        "less than the noise",
        "wrong",
        "of another skew",
        "heuristic not measured",
        "heuristic gains as much on itself",
        "heuristic gains as much on itself, twice",
    ],
)
def test_what_is_not_kept(rows):
    assert tune.best(rows) == []


def test_the_one_that_gains_most_is_kept():
    rows = rows_of(0.05, 0.04) + rows_of(0.06, 0.06, num_stages=4)
    assert [one.plan["num_stages"] for one in tune.best(rows)] == [4]


def test_all_points_of_a_range_count():
    """6 and 8 tokens are of one range, 9 are not."""
    good, other = rows_of(0.05, 0.04), rows_of(0.0, num_tokens=9)
    assert len(tune.best(good + other)) == 1
    level = rows_of(-0.005, num_tokens=6)
    [winner] = tune.best(good + level)
    assert winner.measured["num_tokens"] == [6, 8]
    assert tune.best(good + rows_of(-0.03, num_tokens=6)) == []
    assert tune.best(good + [row(0.0, num_tokens=6)]) == [], "not measured at all of them"


def test_rows_of_an_older_kernel_do_not_count():
    old, new = rows_of(0.05, 0.04), rows_of(0.0)
    for one in old:
        one["kernel"] = "old"
    assert len(tune.best(old)) == 1 and tune.best(old + new) == []


def test_compare():
    rows = rows_of(0.05, 0.04) + [row(0.02, num_stages=4), row(0.3, status="wrong", unroll_k=2)]
    rows += [row(0.001, num_tokens=512), row(-0.1, num_tokens=512, num_stages=3)]
    [point, other] = tune.compare(rows)
    assert (point["plan"], point["gain"], point["again"]) == ("num_stages=3", 0.05, 0.04)
    assert point["kept"] and point["heuristic_us"] == 100.0
    assert (other["plan"], other["gain"], other["kept"]) == ("the heuristic's", 0.0, False)


def test_a_plan_must_fit_traced_too():
    plan = changed(num_stages=5, num_local_pairs=6872)
    plan.check(H200)
    with pytest.raises(PlanError, match="shared memory is 233,472 B"):
        tuned.checked(plan, H200)


def test_token_ranges():
    limit = decode_limit(SMALL)
    assert limit == 128
    problem = MoeProblem(0, 4096, 2048, 32, 6)  # S4
    limit = decode_limit(problem)
    assert 256 < limit < 512, "the bucket changes inside a power of two"
    seen = {}
    for num_tokens in (*range(1, 700), 262_144):
        sized = replace(problem, num_tokens=num_tokens)
        first, last = token_range(sized)
        assert first <= num_tokens <= last
        ends = [token_range(replace(problem, num_tokens=n)) for n in (first, last)]
        assert ends == [(first, last)] * 2, "the same for all in it"
        seen[first, last] = heuristics.bucket(sized)
    assert seen[257, limit] == "decode" and seen[limit + 1, 512] == "prefill"
    assert seen[1, 1] == seen[2, 2] == seen[3, 4] == "decode" and (131_073, 262_144) in seen


# The file


def test_save_is_readable_and_found(site):
    path = tune.save(rows_of(0.05, 0.04))
    assert path == site and [p.name for p in site.parent.glob("[!.]*")] == [site.name]
    text = site.read_text()
    assert '"gpu": "H200",\n' in text and '"num_stages": 3,\n' in text and '"date"' in text
    choice = tuned.choose(SMALL, H200, **FIELDS)
    assert choice == (changed(num_stages=3), site, (5, 8)) and choice.source == "site"
    assert tuned.choose(replace(SMALL, num_tokens=9), H200, **FIELDS).source == "heuristic"


def test_save_replaces_and_keeps(site):
    put(site, entry(tokens=(1, 1), num_stages=4), entry(tokens=(5, 8), num_stages=4))
    tune.save(rows_of(0.05, 0.04))
    entries = tuned.load(site, pytest.fail)
    assert [(e.tokens, e.plan["num_stages"]) for e in entries] == [((1, 1), 4), ((5, 8), 3)]


def test_what_was_measured_and_is_not_ahead_any_more_goes(site):
    put(site, entry(num_stages=3), entry(tokens=(9, 16), num_stages=4))
    tune.save(rows_of(0.0))
    assert [e.plan["num_stages"] for e in tuned.load(site, pytest.fail)] == [4]
    tune.save(rows_of(0.0, num_stages=4, skew="zipf"))
    assert len(tuned.load(site, pytest.fail)) == 1, "of uniform routing alone"


def test_a_write_that_fails_leaves_the_file(site, monkeypatch):
    put(site, entry(num_stages=4))
    before = site.read_text()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuned.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        tune.save(rows_of(0.05, 0.04))
    assert site.read_text() == before
    assert {p.name for p in site.parent.iterdir()} == {"site.json", ".site.json.lock"}


def add(path, first):
    for n in range(first, first + 10):
        put(path, entry(tokens=(n, n), num_stages=4))


def test_writers_at_the_same_time_lose_nothing(site):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add, args=(site, 1 + 10 * n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [e.tokens[0] for e in tuned.load(site, pytest.fail)] == [*range(1, 41)]


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 9, "plans": []}', '{"version": 1}'])
def test_a_damaged_file_is_said_and_not_used(text, site, caplog):
    put(tuned.SHIPPED, entry(num_stages=4))
    site.write_text(text)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            choice = tuned.choose(SMALL, H200, **FIELDS)
    assert choice.source == "shipped" and choice.plan.num_stages == 4
    [said] = [r.getMessage() for r in caplog.records]
    assert str(site) in said and "repair the file, move it away or set JITMOE_TUNED=off" in said
    with pytest.raises(tuned.TunedFileError, match="site.json is damaged and not overwritten"):
        tune.save(rows_of(0.05, 0.04))
    assert site.read_text() == text


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": [5]},
        {"tokens": [8, 5]},
        {"tokens": [5, "8"]},
        {"plan": {"num_stages": 3}},
        {"layer": {}},
        {"more": 1},
        {"plan": "num_stages"},
        {"plan": tuned.plan_fields(changed()) | {"num_stages": "many"}},
        {"plan": tuned.plan_fields(changed()) | {"num_stages": 99}},
        {"plan": tuned.plan_fields(changed()) | {"num_stages": -1}},
        {"plan": tuned.plan_fields(changed()) | {"bucket": "both"}},
    ],
    ids=str,
)
def test_a_damaged_entry_is_said_and_not_used(damage, site, caplog):
    put(site, entry(tokens=(1, 1), num_stages=4), entry(num_stages=3))
    document = json.loads(site.read_text())
    document["plans"][1] |= damage
    site.write_text(json.dumps(document))
    tuned.read.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert tuned.choose(SMALL, H200, **FIELDS) == (changed(), None, None)
    [said] = [r.getMessage() for r in caplog.records]
    assert str(site) in said and ("damaged" in said or "no kernel" in said)
    assert "remove the entry or set JITMOE_TUNED=off" in said
    one = tuned.choose(replace(SMALL, num_tokens=1), H200, **FIELDS)
    assert one.plan.num_stages == 4, "the others count"


def test_a_folder_that_cannot_be_written_is_said(site, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    path = site.parent / "new" / "tuned.json"
    with pytest.raises(
        PermissionError, match=f"{path} cannot be written: {site.parent} is not wri"
    ):
        tune.save(rows_of(0.05, 0.04), path)
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "row, words",
    [
        (3, "it must be an object, got 3"),
        ({"gpu": "H200"}, "it lacks 'tokens'"),
        ({"tokens": 5}, "tokens must be two counts, got 5"),
    ],
)
def test_an_entry_that_is_none_is_said_in_words(row, words, site):
    site.write_text(json.dumps({"version": 1, "plans": [row]}))
    said = []
    assert tuned.load(site, said.append) == []
    assert said == [f"entry 0 of its plans is damaged ({words})"]


def test_no_place_for_a_site_file(site, monkeypatch):
    monkeypatch.setenv("JITMOE_TUNED", "off")
    with pytest.raises(ValueError, match="no place for a site file .*pass one"):
        tune.save(rows_of(0.05, 0.04))
    assert tune.save(rows_of(0.05, 0.04), site) == site
    assert tuned.choose(SMALL, H200, **FIELDS).origin is None, "off is off"
    monkeypatch.setenv("JITMOE_TUNED", "")
    assert tuned.site_file() == cache.directories()[0] / "tuned.json"
    monkeypatch.setenv("JITMOE_NO_CACHE", "1")
    assert tuned.site_file() is None and tuned.files() == [tuned.SHIPPED]


# Who uses it


def test_the_site_comes_before_what_is_shipped(site):
    put(tuned.SHIPPED, entry(num_stages=4), entry(tokens=(9, 16), num_stages=4))
    put(site, entry(num_stages=3))
    assert tuned.choose(SMALL, H200, **FIELDS)[:2] == (changed(num_stages=3), site)
    sixteen = replace(SMALL, num_tokens=16)
    assert tuned.choose(sixteen, H200, **FIELDS)[:2] == (changed(num_stages=4), tuned.SHIPPED)


@pytest.mark.parametrize(
    "problem, gpu, fields",
    [
        (replace(SMALL, num_tokens=4), H200, {}),
        (replace(SMALL, num_tokens=9), H200, {}),
        (replace(SMALL, hidden=384), H200, {}),
        (replace(SMALL, intermediate=160), H200, {}),
        (replace(SMALL, num_experts=5), H200, {}),
        (replace(SMALL, top_k=3), H200, {}),
        (replace(SMALL, format="fp8_channel"), H200, {}),
        (SMALL, GPUS["h100-sxm"], {}),
        (SMALL, replace(H200, num_sms=66), {}),
        (SMALL, H200, {"activation": "reglu2"}),
        (SMALL, H200, {"has_bias": True}),
        (SMALL, H200, {"interleaved": True}),
        (SMALL, H200, {"up_first": True}),
        (SMALL, H200, {"weight_on_input": True}),
        (SMALL, H200, {"batch_invariant": True}),
        (SMALL, H200, {"num_ranks": 4}),
    ],
    ids=str,
)
def test_nothing_else_gets_a_tuned_plan(problem, gpu, fields, site):
    """No neighbour in size, no other GPU, no other layer, no ranks."""
    put(site, entry(num_stages=3))
    assert tuned.choose(SMALL, H200, **FIELDS).origin == site
    assert tuned.choose(SMALL, replace(H200, name="NVIDIA H200"), **FIELDS).origin == site
    choice = tuned.choose(problem, gpu, **FIELDS | fields)
    assert choice == (choose(problem, gpu, **FIELDS | fields), None, None)


def weights():
    sizes = SMALL.num_experts, SMALL.hidden, SMALL.intermediate
    layer = reference.random_layer(*sizes, seed=0, xp=np)
    return jitmoe.ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)


def test_calls_use_it(site):
    put(site, entry(num_stages=3), entry(tokens=(129, 256), num_stages=4))
    layer = weights()
    plans = [find_plan(layer, n, SMALL.top_k, DEFAULT) for n in (1, 4, 5, 8, 9, 128, 129, 257)]
    prefill = replace(SMALL, num_tokens=512)
    expected = [*[changed()] * 2, *[changed(num_stages=3)] * 2, *[changed()] * 2]
    assert plans == [*expected, changed(num_stages=4), changed(prefill)]


def test_warm_up_meets_every_plan(site):
    put(site, entry(num_stages=3), entry(tokens=(129, 256), num_stages=4))
    layer = weights()
    for num_tokens in (1, 4, 5, 6, 8, 9, 128, 129, 200, 256, 257, 5000):
        edges = range_edges(layer, num_tokens, SMALL.top_k, DEFAULT)
        assert edges[-1] == num_tokens and edges == sorted(edges)
        last = {find_plan(layer, n, SMALL.top_k, DEFAULT): n for n in edges}
        for n in range(1, min(num_tokens, 600) + 1):
            plan = find_plan(layer, n, SMALL.top_k, DEFAULT)
            assert last[plan] >= n, "memory for the largest call of each plan"
    most = max(plan.scratch(n).num_bytes for plan, n in last.items())
    most += sum(plan.control(n).num_bytes for plan, n in last.items())
    assert warming.workspace_bytes(layer, 5000, SMALL.top_k) == most


def test_a_tuned_plan_that_does_not_compile_is_not_used(site, monkeypatch, caplog):
    put(site, entry(num_stages=3))
    built = []

    def fail(plan):
        built.append(plan)
        raise CompileError("it spills", "a long log")

    monkeypatch.setattr(planned, "build", fail)
    monkeypatch.setattr(planned, "device_spec", lambda device: H200)
    layer = weights()
    assert layer.device == HOST and find_plan(layer, 8, 2, DEFAULT).num_stages == 3
    assert built == [], "the emulator needs no kernel"
    layer = weights()
    layer.device = 0
    with caplog.at_level(logging.WARNING):
        assert find_plan(layer, 8, SMALL.top_k, DEFAULT) == changed()
    assert "it spills; calls take the heuristic's plan" in caplog.text and len(built) == 1
    assert find_plan(layer, 9, SMALL.top_k, DEFAULT) == changed() and len(built) == 1


def test_emulated_calls_are_right_with_it(site):
    """The tuned plan's kernel runs, and gives what the oracle gives."""
    put(site, entry(num_stages=3, num_task_slots=2))
    layer = weights()
    tokens = reference.random_tokens(8, SMALL.hidden, SMALL.num_experts, SMALL.top_k, 1, xp=np)
    x, x_scale = jitmoe.quantize.tokens(tokens.x, "fp8_block", np)
    ids, router = tokens.topk_ids, tokens.topk_weights
    y = jitmoe.mega_moe((x, x_scale), ids, router, layer, backend="emulated")
    made = reference.random_layer(
        SMALL.num_experts, SMALL.hidden, SMALL.intermediate, seed=0, xp=np
    )
    expected = reference.mega_moe(x, x_scale, ids, router, *made, requantize=True)
    assert reference.relative_error(y, expected) < 5e-3


def test_warmup_command_builds_it(site):
    sizes = ["layer", SMALL.hidden, SMALL.intermediate, SMALL.num_experts, SMALL.top_k]
    shape = prebuild.ModelShape(*sizes, "test")
    before = prebuild.model_plans(shape, 1, "sm_90a", **FIELDS)
    put(site, entry(num_stages=3), entry(replace(SMALL, hidden=384), num_stages=3))
    plans = prebuild.model_plans(shape, 1, "sm_90a", **FIELDS)
    assert plans == [*before, changed(num_stages=3)]
    ranks = FIELDS | {"num_ranks": 4}
    assert len(prebuild.model_plans(shape, 1, "sm_90a", **ranks)) == len(before)


def test_plan_says_so(site):
    assert plan_report(SMALL, H200, **FIELDS)["plan_from"] == "heuristic"
    put(site, entry(num_stages=3))
    report = plan_report(SMALL, H200, **FIELDS)
    assert report["plan_from"] == str(site) and report["num_stages"] == 3
    assert report["bucket_tokens"] == (5, 8)
    sizes = ["--hidden", 256, "--intermediate", 144, "--experts", 4, "--top-k", 2, "--gpu", "h200"]
    for num_tokens, words in ((8, f"tuned, {site}"), (9, "heuristic")):
        args = ["plan", *map(str, sizes), "--tokens", str(num_tokens)]
        shown = CliRunner().invoke(app, args)
        assert f"plan from      {words}\n" in shown.stdout, shown.output
    site.rename(site.with_name("aside.json"))
    tuned.read.cache_clear()
    shown = CliRunner().invoke(app, args)
    assert f"plan from      heuristic; JITMOE_TUNED names {site}, which is" in shown.stdout
    site.with_name("aside.json").rename(site)
    tuned.read.cache_clear()
    shown = CliRunner().invoke(app, ["show", "--plain", *map(str, sizes), "--tokens", "8"])
    assert "num_stages=3" in shown.stdout or "kNumStages = 3" in shown.stdout


def test_what_is_shipped_can_be_used(monkeypatch):
    """Every entry is whole, fits its GPU and is of a range of its layer."""
    path = os.path.join(os.path.dirname(tuned.__file__), tuned.FILE)
    gpus = {tuned.gpu_name(gpu): gpu for gpu in GPUS.values()}
    for one in tuned.load(tuned.Path(path), pytest.fail):
        layer = one.layer
        names = ("hidden", "intermediate", "num_experts", "top_k", "format")
        problem = MoeProblem(one.tokens[1], *(layer[name] for name in names))
        assert token_range(problem) == one.tokens
        fields = {name: layer[name] for name in FIELDS}
        plan = one.apply(choose(problem, gpus[one.gpu], **fields))
        tuned.checked(plan, gpus[one.gpu])
        assert len(one.measured["gains"]) >= 2 and min(one.measured["gains"]) > 0
