"""Examples run, and README says what is there: commands, settings, files, figures, snippets."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_modules import example

import jitmoe
from jitmoe import settings
from jitmoe.bench import records
from jitmoe.plan.models import MODELS
from jitmoe.report import limits

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*"))


def run(*args, **environment):
    result = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_plan_and_render():
    text = run(ROOT / "examples/01_plan_and_render.py")
    assert "decode" in text and "prefill" in text and 'extern "C"' in text


def test_shared_expert():
    assert "6 routed experts and one shared" in run(ROOT / "examples/07_shared_expert.py")


@pytest.mark.parametrize(
    "name, options, where",
    [
        ("09_many_ranks", [], ""),
        ("13_dispatch_combine", [], ""),
        ("13_dispatch_combine", ["--nodes", "2"], ", 2 nodes"),
        ("13_dispatch_combine", ["--nodes", "4"], ", 4 nodes"),
    ],
    ids=str,
)
def test_ranks(name, options, where):
    lines = run(ROOT / f"examples/{name}.py", *options, CUDA_VISIBLE_DEVICES="").splitlines()
    assert lines[0] == f"no GPU here: emulated on this CPU{where}"
    counts = [re.match(r"rank (\d) of 4: (\d+) tokens, relative error \d", x) for x in lines[1:]]
    assert [count.groups() for count in counts] == [
        *zip("0123", ("9", "3", "0", "24"), strict=True)
    ]


@pytest.mark.parametrize(
    "name",
    [
        "02_first_layer",
        "05_torch",
        "06_transformers",
        "08_transformers_speed",
        "10_torchrun",
        "11_mpi",
        "14_dispatch_speed",
    ],
)
def test_examples_say_that_they_need_a_gpu(name):
    text = run(ROOT / f"examples/{name}.py", CUDA_VISIBLE_DEVICES="")
    assert "no GPU here" in text or "no PyTorch" in text


def test_every_example_is_in_readme():
    assert all(path.name in README for path in EXAMPLES)


# README: commands and settings


def test_commands_set_everything_up():
    commands = re.findall(r"^    (python3 -m venv .*)$", README, re.MULTILINE)
    assert [re.search(r"demo|pytest", command)[0] for command in commands] == ["demo", "pytest"]
    for command in commands:
        assert ".venv/bin/pip install" in command and "[cu12" in command


def test_ci_runs_the_test_command(tmp_path):
    """With `python3` and `.venv/bin/*` replaced by scripts that only say that they were called."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_bytes((ROOT / ".ci/run").read_bytes())
    (tmp_path / "README.md").write_text(README)
    for name in ("bin/python3", ".venv/bin/pip", ".venv/bin/python"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> {tmp_path}/calls\n')
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    subprocess.run(["bash", tmp_path / ".ci/run"], env=environment, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    tests = "python -m pytest -n 2 --dist loadfile"
    assert calls == ["python3 -m venv .venv", "pip install -e .[cu12,dev]", tests]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def environment_row(switch):
    default = switch.default
    text = str(int(default)) if isinstance(default, bool) else str(default)
    text = f"{default:g}" if isinstance(default, float) else text
    return f"| `{switch.name}` | {text} | {switch.meaning} |"


def test_environment_table():
    missing = [row for row in map(environment_row, settings.SWITCHES.values()) if row not in README]
    assert not missing, "README's environment table must have:\n" + "\n".join(missing)
    assert set(re.findall(r"JITMOE_[A-Z_]*[A-Z]", README)) <= set(settings.SWITCHES)


def test_limits_and_presets():
    text = " ".join(README.split())
    assert all(words in text for words in limits().values())
    assert all(name in text for name in MODELS)


# README: the tree


def tree():
    """(path, is a folder) of every name in README's tree, a folder's modules too."""
    block = README.split("### The tree\n\n")[1].split("\n\n")[0]
    folder = None
    for line in block.splitlines():
        names, _, text = re.sub(r"^    ", "", line).partition("  ") if line[4] != " " else ("",) * 3
        if names:
            folder = names.strip()
            yield ROOT / folder, True
            continue
        names, _, text = line.strip().partition("  ")
        for name in names.split(", "):
            yield ROOT / folder / name, name.endswith("/")
            if name.endswith("/") and folder == "jitmoe/":
                for module in text.strip().partition("  ")[0].split(", "):
                    yield ROOT / folder / name / f"{module}.py", False


def test_tree_names_what_exists():
    missing = [
        path for path, is_folder in tree() if not (path.is_dir() if is_folder else path.is_file())
    ]
    assert not missing, missing


def in_repository(path):
    """Whether git knows the path; yes where there is no git, as in a source distribution."""
    command = ["git", "ls-files", "--", str(path)]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return True
    return result.returncode != 0 or bool(result.stdout)


def test_tree_is_complete():
    named = {path for path, _ in tree()}
    paths = [p for p in (ROOT / "jitmoe").rglob("*.py") if p.name != "__init__.py"]
    for folder in ("jitmoe", "templates", "tests"):
        folders = (path for path in (ROOT / folder).iterdir() if path.is_dir())
        paths += [p for p in folders if p.name != "__pycache__" and any(p.iterdir())]
    missing = [path for path in paths if path not in named and in_repository(path)]
    assert not missing, f"not in README's tree: {missing}"


# README: snippets


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_snippets_use_what_exists(snippet):
    names = {"jitmoe": jitmoe}
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jitmoe"):
            module = __import__(node.module, fromlist=["x"])
            for alias in node.names:
                if node.module == "jitmoe.integrations":
                    package = alias.name.partition("_")[0]
                    pytest.importorskip(package, reason=f"needs {package}")
                __import__(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = getattr(module, alias.name)
    for name, module in names.items():
        for attribute in set(re.findall(rf"\b{name}\.(\w+)", snippet)):
            assert hasattr(module, attribute), f"{name}.{attribute}"


# README: figures


def make_tables():
    return example("make_tables")


def record(num_tokens=8, us=300.0, date="2026-11-29", **changes):
    row = {
        "bench": "mega_moe",
        "format": "fp8_block",
        "shape": "S1",
        "hidden": 7168,
        "intermediate": 2048,
        "num_experts": 32,
        "top_k": 8,
        "num_tokens": num_tokens,
        "num_ranks": 1,
        "mode": "graph",
        "us_median": us,
        "us_p10": us - 1,
        "us_p90": us + 1,
        "floor_us": 283.0,
        "read_gbps": 4273.0,
        "rel_error": 2.25e-2,
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "date": date,
        "command": "jitmoe bench",
    }
    return records.DEFAULTS | row | changes


PUBLISHED = {
    "date": "2026-11-28",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "method": "graphs",
    "tokens": [1, 8, 8192],
    "ceilings": {"read_gbps": 4273.0, "fp8_tflops": 1450.0},
    "shapes": {
        "S1": {
            "floor": [75.9, 283, 4009],
            "target": [84, 305, 4300],
            "block_fp8": {"Alpha": [93.0, 327, math.nan], "DeepGEMM": [112, 357, 5068]},
            "other": {"bf16": [1.0, 1.0, 1.0]},
        },
        "S2": {"floor": [8.1, 53, 430], "block_fp8": {"Alpha": [22.0, 72.3, 1649]}},
    },
}


def test_figures_are_up_to_date():
    run(ROOT / "examples/make_tables.py", "--check")


def test_tables():
    module = make_tables()
    rows = [
        record(8, 310.0, date="2026-11-28"),
        record(8, 305.0),
        record(1, 84.0),
        record(8, 20.0, mode="eager", rel_error=None),
        record(8, 400.0, method="torch"),
        record(8, method="broken", status="failed", us_median=None),
        record(8, 330.0, heat="hot"),
        record(8, 110.0, routing="zipf"),
    ]
    text = module.updated(f"a\n{module.BEGIN}\nold\n{module.END}\nb\n", rows)
    assert text.startswith("a\n") and text.endswith("\nb\n") and "old" not in text
    assert "| 8 | **305** | 304 to 306 | 18.5 | 283 | 0.93 | 2.25e-02 |" in text
    assert "| 1 | **84** | 83 to 85 | 8.39 | 283 | 3.37 | 2.25e-02 |" in text
    assert "310" not in text, "the latest counts"
    assert text.index("| 1 |") < text.index("| 8 | **305**")
    assert "| 2.25e-02 | 400 |" in text and "torch us" in text, "a peer beside ours"
    assert "broken" not in text and "#### torch" not in text
    alone = module.figures([record(8, 400.0, method="torch")], [], False)
    assert "#### torch fp8_block, S1, graph\n" in alone, "a peer where ours is not"
    assert "S1, graph, hot" in text and "S1, graph, zipf" in text
    assert "S1, eager" in text and "2026-11-29; `jitmoe bench`" in text
    eager = text.split("S1, eager")[1].split("####")[0]
    assert "relative error" not in eager, "empty columns are left out"
    assert module.updated(text, rows) == text, "making them twice changes nothing"


def test_tables_of_ranks():
    """With and without presum apart, beside one rank; and never in the place of one rank."""
    module = make_tables()
    sent = {"pairs": 2e7, "once": 1.6e7, "presum": 1.3e7, "tables": 1e6}
    ranks = {"num_ranks": 8, "one_rank_us": 290.0, "of_one_rank": 1.0345, "group": "LocalGroup"}
    rows = [
        record(8, 305.0),
        record(8, 300.0, **ranks, presum=True, link_bytes=sent | {"moved": 1.4e7}),
        record(8, 310.0, **ranks, link_bytes=sent | {"moved": 1.7e7}),
    ]
    text = module.figures(rows, [], False)
    assert text.count("####") == 3 and "32 experts and tokens of each rank, hidden 7168" in text
    one, many, summed = sorted(text.split("\n#### "), key=len)
    assert "one rank us" not in one and "MB sent" not in one
    assert "S1, 8 ranks, graph" in many and "S1, 8 ranks, presum, graph" in summed
    assert "| 290 | 1.034 | 14 | 0.70 |" in summed and "| 290 | 1.034 | 17 | 0.85 |" in many
    (point,) = records.compare(rows, PUBLISHED)["S1"]
    assert point.us == 305.0


def test_comparison():
    module = make_tables()
    rows = [
        record(1, 84.0, read_gbps=4230.27),  # a card that is 1 % slower
        record(8, 305.0),
        record(8, 310.0, routing="zipf"),
        record(8, 200.0, activation="relu2_no_gate"),
        record(8192, 5000.0, floor_us=4009.0, fp8_tflops=1595.0),  # and one 10 % faster
        record(8, 320.0, method="sgl", is_block_fp8=True),
        record(8, 100.0, method="bf16", is_block_fp8=False),
        record(128, 1.0, shape="S3"),
    ]
    points = records.compare(rows, PUBLISHED)
    assert points["S2"] == []
    one, eight, many = points["S1"]
    assert (one.best_peer, one.of_best) == ("Alpha", pytest.approx(0.99 * 84 / 93))
    assert (eight.best_peer, eight.of_target) == ("sgl, measured here", 1.0)
    assert eight.of_best == 305 / 320
    assert (many.best_peer, many.of_best) == ("DeepGEMM", pytest.approx(1.1 * 5000 / 5068))
    text = "\n\n".join(module.comparisons(rows, PUBLISHED, picture=True))
    assert "| 1 | **84** | 93 | Alpha | 0.89 | 84 | 0.99 | 283 | 3.37 |" in text
    assert f"]({module.PICTURE})" in text and "S2" not in text
    assert module.PICTURE not in "".join(module.comparisons(rows, PUBLISHED, picture=False))
    assert module.comparisons([], PUBLISHED, picture=True) == []


def test_published_figures_are_whole():
    for figures in records.published(ROOT / "examples/records"):
        for shape, part in figures["shapes"].items():
            columns = [part["floor"], part["target"], *part["block_fp8"].values()]
            columns += part["other"].values()
            assert {len(column) for column in columns} == {len(figures["tokens"])}, shape
            best = [min(us) for us in zip(*part["block_fp8"].values(), strict=True)]
            assert all(f < t < b for f, t, b in zip(*columns[:2], best, strict=True)), shape


def test_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs the bench extra")
    picture = example("make_picture")
    rows = [record(1, 84.0), record(8, 305.0), record(1, 20.0, shape="S2")]
    comparisons = records.compare(rows, PUBLISHED)
    assert picture.series(comparisons["S1"]) == {
        "jitmoe": [84.0, 305.0],
        "best block-FP8 peer": [93.0, 327],
        "floor": [283.0, 283.0],
    }
    for name in ("a.svg", "b.svg"):
        picture.draw(comparisons, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert all(word in drawn for word in ("S1", "S2", "microseconds", *picture.LINES))


def test_tables_of_bad_records(tmp_path):
    module = make_tables()
    assert module.figures([], [], picture=True) == module.NOTHING
    with pytest.raises(ValueError, match="README.md must hold"):
        module.updated("no marks", [])
    (tmp_path / "a.jsonl").write_text(json.dumps(record()) + "\n\n{}\n")
    with pytest.raises(ValueError, match="a.jsonl:3: lacks bench"):
        records.load(tmp_path)
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(ValueError, match="a.jsonl:1: not JSON"):
        records.load(tmp_path)
