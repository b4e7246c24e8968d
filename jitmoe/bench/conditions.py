"""Where, when and with what something was measured."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jitmoe.jit import nvrtc

PACKAGES = (
    "jitmoe",
    "cuda-bindings",
    "cuda-core",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numpy",
    "torch",
    "triton",
    "transformers",
    "sgl-deep-gemm",
)


def conditions(gpu: str, command: str) -> dict:
    """GPU, driver, versions, clocks, date, command, commit; None for what cannot be known."""
    versions = {"nvrtc": nvrtc.version(), "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "gpu": gpu,
        "driver": _nvidia_smi("driver_version"),
        "versions": versions,
        "clocks": _nvidia_smi("clocks.sm,clocks.mem"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
        "commit": commit(),
    }


def commit() -> str | None:
    """The checkout this package lies in; with "+" where its files differ."""
    git = ("git", "-C", str(Path(__file__).resolve().parents[2]))
    name = _output(*git, "rev-parse", "--short", "HEAD")
    changed = name and _output(*git, "status", "--porcelain", "--", "jitmoe", "templates")
    return f"{name}+" if changed else name


def _nvidia_smi(fields: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def _output(*command: str) -> str | None:
    """The first line that a command prints; None if there is none or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None
