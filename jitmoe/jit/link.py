"""Source text and device libraries -> one cubin, by LTO: NVRTC gives LTO-IR, nvJitLink the rest."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jitmoe.jit import nvrtc
from jitmoe.jit.nvrtc import CompileError, Cubin, ToolchainError


@dataclass(frozen=True)
class Library:
    """Device code in LTO-IR that a wheel brings: `file` in the folder of `package`."""

    package: str
    file: str
    remedy: str


LIBRARIES = {
    "nccl_device": Library(
        "nvidia.nccl",
        "lib/libnccl_device.ltoir",
        "it comes with NCCL 2.32 and later: pip install 'jitmoe[nccl12]', or 'jitmoe[nccl13]' for "
        "CUDA 13",
    )
}
_LINKER = "pip install 'jitmoe[nccl12]', or 'jitmoe[nccl13]' for CUDA 13"


def compile(text: str, arch: str, name: str, kernel: str, libraries: Sequence[str]) -> Cubin:
    """As nvrtc.compile, with `libraries` (names of LIBRARIES) linked to the kernel of that name.

    Raises CompileError with the log of the compiler or the linker, ToolchainError where nvJitLink
    or a library is missing or too old, ValueError for a setting of the wrong kind.
    """
    paths = [find(library) for library in libraries]
    version()  # finds a missing linker, and says so
    start = time.perf_counter()
    code, log = nvrtc.to_lto_ir(text, arch, name)
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(name=name, arch=arch, kernels_used=kernel, **_options())
    try:
        linker = Linker(code, *map(ObjectCode.from_ltoir, map(str, paths)), options=options)
        data = bytes(linker.link("cubin").code)
    except Exception as error:  # cuda.core's class is private; its text ends with nvJitLink's log
        raise _refusal(name, arch, str(error).replace("\0", "")) from None
    log += own_log(linker.get_info_log().replace("\0", ""))
    linker.close()
    return Cubin(data, log, nvrtc.parse_log(log), time.perf_counter() - start)


def _refusal(name: str, arch: str, log: str) -> CompileError:
    if "OUTDATED_LIBRARY" in log or "newer version of nvJitLink" in log:
        return ToolchainError(
            f"nvJitLink {version()} is older than what made its input; pip install -U "
            "nvidia-nvjitlink, or nvidia-nvjitlink-cu12 for CUDA 12",
            log,
        )
    return CompileError(f"{name} does not link for {arch}", log)


def find(library: str) -> Path:
    """Where a library of LIBRARIES lies. Raises ToolchainError if no wheel has brought it."""
    wanted = LIBRARIES[library]
    try:
        spec = importlib.util.find_spec(wanted.package)
    except ModuleNotFoundError:  # of the parent package
        spec = None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / wanted.file
        if path.is_file():
            return path
    raise ToolchainError(
        f"the kernel needs {Path(wanted.file).name}, and Python finds none in {wanted.package}; "
        f"{wanted.remedy}"
    )


def inputs(libraries: Sequence[str]) -> tuple[str, ...]:
    """What decides a linked cubin beside the options of NVRTC, for the cache key; () for none.

    Raises as `compile`.
    """
    if not libraries:
        return ()
    options = (f"{name}={value}" for name, value in sorted(_options().items()))
    digests = (f"{name}={_digest(find(name))}" for name in libraries)
    return f"nvjitlink={version()}", *options, *digests


def _digest(path: Path) -> str:
    stat = path.stat()
    return _digest_of(path, stat.st_mtime_ns, stat.st_size)


@lru_cache
def _digest_of(path: Path, _mtime: int, _num_bytes: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _options() -> dict:
    """Arguments of LinkerOptions that go to the linker, beside name, architecture and kernel."""
    return {
        "link_time_optimization": True,
        "optimize_unused_variables": True,
        "ptxas_options": "-v",
        "lineinfo": nvrtc.wants_lines(),
        "verbose": True,  # else there is no log
        "no_cache": True,  # as for NVRTC
    }


@lru_cache
def version() -> str:
    """The full version of nvJitLink, such as "12.9.86". Raises ToolchainError if there is none.

    nvJitLink itself tells major and minor only; the PTX of an empty program tells all.
    """
    nvrtc.version()  # finds missing bindings, and says so
    try:
        from cuda.bindings import nvjitlink

        major, minor = nvjitlink.version()
    except Exception as error:  # ImportError, or the loader's own classes
        reason = " ".join(str(error).split())
        raise ToolchainError(f"nvJitLink was not found; {_LINKER} ({reason})") from error
    code, _ = nvrtc.to_lto_ir("", "sm_90a", "version.cu")
    from cuda.core import Linker, LinkerOptions

    options = LinkerOptions(arch="sm_90a", link_time_optimization=True, ptx=True)
    linker = Linker(code, options=options)
    match = re.search(rb"release [\d.]+, V([\d.]+)", bytes(linker.link("ptx").code))
    linker.close()
    return match[1].decode() if match else f"{major}.{minor}"


_SECTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def own_log(log: str) -> str:
    """ptxas's log with functions of libraries told in other words. They are called, and what a
    called function saves of its caller's registers is a spill to ptxas; spills of the kernel are
    what they say.
    """
    entries = set(re.findall(r"Compiling entry function '(\S+)'", log))
    lines, function = [], ""
    for line in log.splitlines():
        if section := _SECTION.search(line):
            function = "" if section[1] in entries else section[1]
        if function and (frame := _FRAME.search(line)):
            size, saved, _ = frame.groups()
            lines.append(f"called: {function}: frame of {size} bytes, {saved} of them saved")
        elif not (function and section):
            lines.append(line)
    return "\n".join(lines) + "\n"
