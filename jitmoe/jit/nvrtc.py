"""Source text -> cubin through NVRTC, and what ptxas said about it."""

from __future__ import annotations

import io
import re
import threading
import time
from dataclasses import dataclass
from functools import lru_cache

from jitmoe import settings
from jitmoe.plan.plan import Plan

STD = "c++20"

# A first `import cuda.core` on two threads at once fails on one of them (cuda.core 1.2).
_import_lock = threading.Lock()


class CompileError(RuntimeError):
    """A kernel that did not compile, or compiled to something slow.

    `log` is the compiler's output; `source` is where the text was written, or "" if nowhere.
    """

    def __init__(self, message: str, log: str = "", source: str = ""):
        self.message, self.log, self.source = message, log, source
        super().__init__(message, log, source)  # the arguments, so that pickling works

    def __str__(self) -> str:
        where = f"\nsource: {self.source}" if self.source else ""
        log = f"\n{self.log.strip()}" if self.log.strip() else ""
        return f"{self.message}{where}{log}"


class ToolchainError(CompileError):
    """NVRTC or its Python bindings are missing or broken; the text says what to install."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports with `-v`, the maximum over functions.

    `messages` are its remarks C75xx: `setmaxnreg` ignored, WGMMA serialised or waits put in.
    """

    num_regs: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    stack_bytes: int = 0
    static_smem_bytes: int = 0
    num_barriers: int = 0
    messages: tuple[str, ...] = ()

    def check(self, plan: Plan, log: str = "", source: str = "") -> None:
        """Raise CompileError naming the plan if registers spill, ptxas made a C75xx remark, or the
        log does not tell.
        """
        failures = list(self.messages)
        if self.num_regs == 0:
            failures.append("the log has no count of registers, so they may spill")
        if self.spill_store_bytes or self.spill_load_bytes:
            failures.append(
                f"registers spill ({self.spill_store_bytes} bytes of stores, "
                f"{self.spill_load_bytes} of loads)"
            )
        if failures:
            raise CompileError(f"{'; '.join(failures)}: {plan} compiles badly", log, source)


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: the bytes the driver loads, the compiler's log and what it took."""

    data: bytes
    log: str
    resources: Resources
    seconds: float


def compile(text: str, arch: str, name: str) -> Cubin:
    """Compile `text` for `arch` ("sm_90a"); `name` is its file in messages and line information.

    Raises CompileError with NVRTC's log, ToolchainError if NVRTC is missing, ValueError for a
    setting of the wrong kind.
    """
    start = time.perf_counter()
    code, log = _compile("cubin", text, arch, name, _options())
    return Cubin(bytes(code.code), log, parse_log(log), time.perf_counter() - start)


def to_lto_ir(text: str, arch: str, name: str) -> tuple[object, str]:
    """The same without ptxas, for the linker: cuda.core's ObjectCode and NVRTC's log."""
    return _compile("ltoir", text, arch, name, _lto_options())


def _compile(kind: str, text: str, arch: str, name: str, options: dict) -> tuple[object, str]:
    version()  # finds a missing toolchain, and says so
    with _import_lock:
        from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    program = Program(text, "c++", ProgramOptions(name=name, arch=arch, **options))
    try:
        code = program.compile(kind, logs=log)
    except Exception as error:
        # cuda.core's error is of a private class; its text ends with NVRTC's log.
        raise CompileError(
            f"{name} does not compile for {arch}", log.getvalue() or str(error)
        ) from None
    finally:
        program.close()
    return code, log.getvalue().replace("\0", "")


def wants_lines() -> bool:
    """Whether kernels have line information. Raises ValueError for a setting of the wrong kind."""
    return bool(settings.get("JITMOE_LINEINFO"))


def _lto_options() -> dict:
    options = {name: value for name, value in _options().items() if name != "ptxas_options"}
    return options | {"link_time_optimization": True, "relocatable_device_code": True}


def _options() -> dict:
    """Arguments of ProgramOptions that go to the compiler, beside name and arch."""
    return {
        "std": STD,
        "ptxas_options": "-v",
        "diag_suppress": 177,  # unused constants: a plan prints all it has
        "lineinfo": wants_lines(),
        # Kernels have a cache of ours, and what NVRTC's own may give again might have no log. That
        # is supposed, not shown: of a plan that spills, a first call failed on an H200 and later
        # ones did not (NVRTC 13.0, 2026-11-30).
        "no_cache": True,
    }


def options() -> tuple[str, ...]:
    """What is asked of the compiler beside the architecture, for the cache key.

    Raises ValueError for a setting of the wrong kind.
    """
    return tuple(f"{name}={value}" for name, value in sorted(_options().items()))


@lru_cache
def version() -> str:
    """The full version of the NVRTC in use, such as "12.9.86". Raises ToolchainError if none is.

    NVRTC itself tells major and minor only; the PTX of an empty program tells all (0.03 s, once).
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"cuda-python is not installed; {_INSTALL}") from error
    try:
        status, program = nvrtc.nvrtcCreateProgram(b"", b"version.cu", 0, [], [])
    except (
        Exception
    ) as error:  # the loader's own classes, one for each way of not finding the library
        reason = " ".join(str(error).split())
        raise ToolchainError(f"NVRTC was not found; {_INSTALL} ({reason})") from error
    _call(status)
    try:
        _call(*nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=compute_90"]))
        num_bytes = _call(*nvrtc.nvrtcGetPTXSize(program))
        ptx = bytearray(num_bytes)
        _call(*nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    match = re.search(rb"release [\d.]+, V([\d.]+)", ptx)
    if match:
        return match[1].decode()
    return "{}.{}".format(*_call(*nvrtc.nvrtcVersion()))


_INSTALL = "install jitmoe[cu12] or jitmoe[cu13], whichever your driver supports"


def _call(status, *results):
    if int(status):
        raise ToolchainError(f"NVRTC fails on an empty program: {status.name}; {_INSTALL}")
    return results[0] if len(results) == 1 else results


_COUNTS = {
    "num_regs": r"Used (\d+) registers",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
    "stack_bytes": r"(\d+) bytes stack frame",
    "static_smem_bytes": r"(\d+) bytes smem",
    "num_barriers": r"used (\d+) barriers",
}
_WARNING = re.compile(r"^.*\(?\bC75\d\d\b.*$|^.*Potential Performance Loss.*$", re.MULTILINE)


def parse_log(log: str) -> Resources:
    """Resources from the text of `ptxas -v`."""
    counts = {
        name: max(map(int, re.findall(pattern, log)), default=0)
        for name, pattern in _COUNTS.items()
    }
    messages = dict.fromkeys(
        match[0].strip() for match in _WARNING.finditer(log)
    )  # in order, each once
    return Resources(**counts, messages=tuple(messages))
