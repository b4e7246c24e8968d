"""`jitmoe doctor`: what was found where, what is missing and how to get it. Never raises."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jitmoe import doctor_files
from jitmoe.doctor_files import Finding

PROBE = 'extern "C" __global__ void probe(float* y) { y[threadIdx.x] = 1.0f; }\n'
INSTALL = "pip install 'jitmoe[cu12]' (or [cu13], where the driver supports CUDA 13)"


def examine() -> list[Finding]:
    """Every finding, in the order of printing. A check that breaks is a finding as well."""
    checks = (
        ("python", _python),
        ("driver", _driver),
        ("cuda-bindings", lambda: _package("cuda-bindings", "cuda.bindings")),
        ("cuda-core", lambda: _package("cuda-core", "cuda.core")),
        ("cupy", _cupy),
        ("nvrtc", _nvrtc),
        ("compile", _compile),
        ("nccl4py", _nccl),
        ("templates", _templates),
        ("cache", doctor_files.cache),
        ("tuned plans", doctor_files.tuned_plans),
        ("c++ compiler", _host_compiler),
        ("settings", _settings),
    )
    return [finding for name, check in checks for finding in _run(name, check)]


def print_findings(console, findings: list[Finding]) -> None:
    """A line each; remedies below."""
    from rich.text import Text

    colours = {"ok": "green", "note": "yellow", "missing": "red"}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.status:<8}", style=colours[finding.status])
        line.append(f"{finding.name:<{width}}  {finding.text}", style="default")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':<{width + 10}}-> {finding.remedy}"), soft_wrap=True)


def _run(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    findings = []
    try:
        findings.extend(check())
    except Exception as error:  # whatever is broken here, the other lines still help
        findings.append(Finding("missing", name, f"{type(error).__name__}: {error}"))
    return findings


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")


def _driver() -> Iterator[Finding]:
    from jitmoe.run.driver import call, device_spec, driver, driver_version

    try:
        module = driver()
        call(module.cuInit, 0)
        count = call(module.cuDeviceGetCount)
    except Exception as error:  # the loader's own classes too, where there is no driver
        yield Finding(
            "note",
            "gpu",
            f"none: kernels can be planned and built here, not run ({_first_line(error)})",
            "on a machine with a GPU, install NVIDIA's driver and, in a container, pass the GPU in",
        )
        return
    major, minor = driver_version()
    yield Finding("ok", "driver", f"supports CUDA {major}.{minor}")
    wheels = int(importlib.metadata.version("cuda-bindings").split(".")[0])
    if major < wheels:
        yield Finding(
            "missing",
            "driver",
            f"supports CUDA {major}, the installed wheels are for CUDA {wheels}",
            f"pip install 'jitmoe[cu{major}]' in a fresh environment, or update the driver",
        )
    for device in range(count):
        try:
            spec = device_spec(device)
        except ValueError as error:
            yield Finding("note", f"gpu {device}", str(error))
            continue
        memory = call(module.cuDeviceTotalMem, call(module.cuDeviceGet, device))
        text = f"{spec.name}, {spec.arch}, {spec.num_sms} SMs, {memory / 1e9:.0f} GB"
        yield Finding("ok", f"gpu {device}", text)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _package(distribution: str, module: str) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version(distribution)
        path = importlib.import_module(module).__path__[0]
    except ImportError as error:  # PackageNotFoundError too
        yield Finding("missing", distribution, f"not installed ({error})", INSTALL)
        return
    yield Finding("ok", distribution, f"{version} at {path}")


def _cupy() -> Iterator[Finding]:
    wheels = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy")
        if _installed(name)
    ]
    if len(wheels) > 1:
        text = f"{' and '.join(wheels)} are installed and overwrite each other"
        yield Finding("missing", "cupy", text, "uninstall all of them, then install one")
        return
    try:
        path = importlib.import_module("cupy").__path__[0]
    except Exception as error:
        from jitmoe.run.driver import num_devices

        status = "missing" if num_devices() else "note"
        yield Finding(status, "cupy", f"not usable ({error}); needed to run kernels", INSTALL)
        return
    yield Finding("ok", "cupy", f"{wheels[0] if wheels else 'built from source'} at {path}")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _nvrtc() -> Iterator[Finding]:
    from jitmoe.jit import nvrtc

    try:
        version = nvrtc.version()
    except nvrtc.ToolchainError as error:
        yield Finding("missing", "nvrtc", str(error), INSTALL)
        return
    yield Finding("ok", "nvrtc", f"{version} at {_loaded_library('libnvrtc.so')}")


def _loaded_library(name: str) -> str:
    """Where this process mapped a shared library from."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return next((path for path in paths if name in path), "an unknown place")


def _compile() -> Iterator[Finding]:
    from jitmoe.jit import nvrtc

    start = time.perf_counter()
    try:
        cubin = nvrtc.compile(PROBE, "sm_90a", "doctor.cu")
    except (nvrtc.CompileError, nvrtc.ToolchainError) as error:
        yield Finding("missing", "compile", f"NVRTC builds no kernel for sm_90a: {error}", INSTALL)
        return
    seconds = time.perf_counter() - start
    text = f"a small kernel for sm_90a: {len(cubin.data):,} bytes in {seconds:.2f} s"
    yield Finding("ok", "compile", text)


def _nccl() -> Iterator[Finding]:
    from jitmoe.run import nccl_library

    if not _installed("nccl4py"):
        text = "not installed; only a NcclGroup needs it"
        yield Finding("note", "nccl4py", text, "pip install 'jitmoe[nccl]'")
        return
    try:
        library = nccl_library.load().get_version().libnccl
    except (ImportError, RuntimeError) as error:
        yield Finding("note", "nccl4py", str(error))
        return
    yield Finding("ok", "nccl4py", f"NCCL {library.version} at {library.path}")


def _templates() -> Iterator[Finding]:
    from jitmoe.jit.render import RenderError, templates_dir

    try:
        yield Finding("ok", "templates", str(templates_dir()))
    except RenderError as error:
        yield Finding("missing", "templates", str(error), "install jitmoe again")


def _host_compiler() -> Iterator[Finding]:
    from jitmoe.emulate import compile as host

    try:
        text = f"{' '.join(host.compiler())}: {host.compiler_version()}"
    except (RuntimeError, OSError) as error:
        text = "none that works; only running kernels on a CPU needs one"
        remedy = f"install g++ 12 or later, or pip install ziglang ({_first_line(error)})"
        yield Finding("note", "c++ compiler", text, remedy)
        return
    yield Finding("ok", "c++ compiler", text)


def _settings() -> Iterator[Finding]:
    from jitmoe import settings

    for name in settings.SWITCHES:
        try:
            value = settings.get(name)
        except ValueError as error:
            yield Finding("missing", "settings", str(error), f"unset {name}")
            continue
        if os.environ.get(name):
            yield Finding("ok", "settings", f"{name}={value}")
    for name in settings.unknown():
        known = ", ".join(settings.SWITCHES)
        yield Finding("note", "settings", f"{name} is no switch of jitmoe", f"known are {known}")
