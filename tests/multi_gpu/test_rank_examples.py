"""The examples on ranks, as they are meant to be run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Open MPI asks whoever is root to say so twice.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def lines_of(*command):
    result = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | AS_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith("rank ")]


def test_local_group():
    assert len(lines_of(sys.executable, "examples/09_many_ranks.py")) == 4


def test_torchrun():
    pytest.importorskip("torch", reason="torchrun is PyTorch's")
    torchrun = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"
    assert len(lines_of(*torchrun, "examples/10_torchrun.py")) == 2


def test_mpi():
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("needs mpirun")
    assert len(lines_of(mpirun, "-n", 2, sys.executable, "examples/11_mpi.py")) == 2
