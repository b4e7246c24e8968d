"""Pictures of sweeps: what is drawn of rows. Needs matplotlib, no GPU."""

from pathlib import Path

import pytest

from jitmoe import tune
from jitmoe.plan.gpu import GPUS
from jitmoe.tracing.summary import Summary

pytest.importorskip("matplotlib", reason="plots need the notebook extra")

RECORD = Path(__file__).resolve().parents[2] / "examples/records/tune/2026-11-30-h200.jsonl"
TOKENS = [1, 8, 32, 128, 512, 2048, 8192]


@pytest.fixture(scope="module")
def rows():
    return [row for row in tune.load(RECORD) if row["shape"] in ("S1", "S2")]


def lines(axis):
    """Label -> points, of what a legend names."""
    return {
        line.get_label(): dict(zip(*line.get_data(), strict=True))
        for line in axis.get_lines()
        if not line.get_label().startswith("_")
    }


def test_times(rows):
    figure = tune.plot.times(rows, {"S1": {"Another": {1: 93.0, 8: 327.0}}})
    first, second = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["S1", "S2"]
    assert set(lines(first)) == {"heuristic", "best plan", "floor", "Another"}
    assert set(lines(second)) == {"heuristic", "best plan", "floor"}
    drawn = lines(first)
    assert list(drawn["heuristic"]) == TOKENS and drawn["Another"] == {1: 93.0, 8: 327.0}
    for n in TOKENS:
        assert drawn["floor"][n] < drawn["best plan"][n] <= drawn["heuristic"][n]
    (point,) = (p for p in tune.compare(rows) if (p["shape"], p["num_tokens"]) == ("S1", 2048))
    assert drawn["heuristic"][2048] == point["heuristic_us"]
    assert drawn["best plan"][2048] == point["best_us"] < point["heuristic_us"]
    assert (first.get_xscale(), first.get_yscale()) == ("log", "log")


def test_speedup_marks_what_is_kept(rows):
    rows = [dict(row) for row in rows if row["shape"] == "S2"]
    winner = next(r for r in rows if r["num_tokens"] == 1 and r["changes"] == "num_task_slots=2")
    winner["gain"] = 0.0287
    again = [row | {"round": 2} for row in rows if row["num_tokens"] == 1]
    [axis] = tune.plot.speedup(rows + again).axes
    marks = [line for line in axis.get_lines() if line.get_marker() == "o"]
    faces = {line.get_xdata()[0]: line.get_markerfacecolor() for line in marks}
    assert {n for n, face in faces.items() if face != "white"} == {1}
    gains = {line.get_xdata()[0]: line.get_ydata()[0] for line in marks}
    assert gains[1] == pytest.approx(2.87, abs=0.01) and list(gains) == TOKENS


def test_roofline(rows):
    [axis] = tune.plot.roofline(rows).axes
    drawn = lines(axis)
    assert set(drawn) == {"S1", "S2", "roof, fp8_block"} and len(drawn["S1"]) == len(TOKENS)
    gpu = GPUS["h200"]
    for intensity, tflops in (drawn["S1"] | drawn["S2"]).items():
        assert tflops < min(gpu.fp8_tflops, 1.01 * intensity * gpu.read_gbps * 1e-3)
    with pytest.raises(ValueError, match="no rates of H999; pass gpu="):
        tune.plot.roofline([row | {"gpu": "H999"} for row in rows])
    tune.plot.roofline([row | {"gpu": "H999"} for row in rows], gpu)


def test_candidates(rows):
    failed = rows[3] | {"status": "crashed", "gain": None, "num_stages": 9}
    figure = tune.plot.candidates([*rows, failed], "num_stages")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["num_stages 3", "num_stages 4", "num_stages 5", "num_stages 9"]
    circles = [line for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    drawn = sum(len(line.get_xdata()) for line in circles)
    others = [row for row in [*rows, failed] if row["shape"] == "S1" and not row["is_heuristic"]]
    assert drawn == sum(row["status"] == "ok" for row in others)
    assert sum(len(line.get_xdata()) for line in crosses) == len(others) - drawn > 1
    with pytest.raises(ValueError, match="field must be one of bucket, .*got 'hidden'"):
        tune.plot.candidates(rows, "hidden")


def test_roles():
    facts = dict.fromkeys(Summary.__dataclass_fields__, 0)
    facts |= {"unit": "ns", "duration": 200, "busy": {"load": 0.25, "math": 0.5}}
    waits = {"load": {"stage empty": 100.0, "task full": 1.0}, "math": {"stage full": 40.0}}
    figure = tune.plot.roles({"a": Summary(**facts | {"waits": waits})})
    [axis] = figure.axes
    bars = [(bar.get_y() + 0.4, bar.get_x(), bar.get_width()) for bar in axis.patches]
    assert bars == [(0, 0, 25), (0, 25, 50), (1, 0, 50), (1, 50, 20)], (
        "waits below 1 % are left out"
    )
    assert axis.get_title() == "a: 200 ns"
    assert [text.get_text() for text in axis.get_yticklabels()] == ["load", "math"]


@pytest.mark.parametrize("draw", [tune.plot.times, tune.plot.speedup, tune.plot.roofline])
def test_nothing_to_draw(draw, rows):
    with pytest.raises(ValueError, match="sweep first"):
        draw([row | {"status": "failed"} for row in rows])
