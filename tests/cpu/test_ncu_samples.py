"""Samples of Nsight Compute by role and function: a report as its source page looks, of a kernel
that is compiled here.
"""

import csv
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from example_modules import EXAMPLES, example

from jitmoe.jit.build import build
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem

PREFILL = choose(MoeProblem(MAX_TOKENS, 256, 128, 4, 2), gpu_spec("H200"))
HEAD = ["Address", "Source", "# Samples", "stall_long_sb", "stall_wait", "stall_wait (Not Issued)"]


NAME = "16_ncu_samples"
samples = example(NAME)


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    """A kernel with line information, in a cache of its own."""
    try:
        samples.disassembler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JITMOE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JITMOE_LINEINFO", "1")
        return build(replace(PREFILL, unroll_k=1)).path


def write_report(path, *kernels):
    """Kernels of so many instructions, with two samples each: a wait and a load."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        for number in kernels:
            writer.writerow(["Kernel Name", "mega_moe"])
            writer.writerow(HEAD)
            writer.writerows([hex(16 * i), "NOP", 2, 1, 1, 1] for i in range(number))
    return path


def run(*args):
    command = [sys.executable, EXAMPLES / f"{NAME}.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_sample_has_a_role_and_a_function(entry, tmp_path):
    number = len(samples.read_places(entry / "kernel.cubin"))
    report = write_report(tmp_path / "rep.csv", 3, number)
    done = run(report, entry, "--kernel", "1", "--depth", "3", "--lines", "100000")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(\d+) +([\d.]+)%  (\w*): (.*) \((.*)\)$", done.stdout, re.MULTILINE)
    assert sum(int(row[0]) for row in rows) == 2 * number
    assert all(f"long_sb {int(row[0]) // 2}, wait {int(row[0]) // 2}" == row[4] for row in rows)
    roles = {row[2] for row in rows}
    assert {"run_head", "role_math", "role_load", "role_schedule", "role_deliver"} <= roles
    for role in roles:
        assert sum(float(row[1]) for row in rows if row[2] == role) == pytest.approx(100, abs=3)
    main_loop = [row for row in rows if row[3] == "run_task/run_tile/multiply"]
    assert [row[2] for row in main_loop] == ["role_math"] and int(main_loop[0][0]) > 200


def test_refusals(entry, tmp_path):
    report = write_report(tmp_path / "rep.csv", 3)
    other = run(report, entry)
    assert other.returncode == 1 and "the report's kernel has 3 instructions" in other.stderr
    assert "pass the entry that ran" in other.stderr
    assert "--kernel must be below 1, got 1" in run(report, entry, "--kernel", 1).stderr
    none = run(tmp_path / "none.csv", entry)
    assert none.returncode == 1 and "none.csv" in none.stderr and "Traceback" not in none.stderr
    bare = tmp_path / "bare.csv"
    bare.write_text("Kernel Name,mega_moe\nAddress,Source\n0x0,NOP\n", encoding="utf-8")
    said = run(bare, entry).stderr
    assert "has no column '# Samples'; export it by --section SourceCounters" in said
    missing = run(report, tmp_path)
    assert missing.returncode == 1 and "kernel.cu" in missing.stderr


def test_without_lines(tmp_path, monkeypatch):
    try:
        samples.disassembler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path))
    entry = build(replace(PREFILL, unroll_k=2)).path
    report = write_report(tmp_path / "rep.csv", len(samples.read_places(entry / "kernel.cubin")))
    done = run(report, entry)
    assert done.returncode == 1 and "no line information; run with JITMOE_LINEINFO=1" in done.stderr
