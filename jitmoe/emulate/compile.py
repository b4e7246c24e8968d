"""Rendered text -> executable: the emulated machine (runtime/*.cpp) and the kernel, and a cache.

The compiler is $CXX, else g++ or clang++, else the `ziglang` wheel. Executables lie in the folder
`emulated` of the kernel cache, named by a hash of everything they depend on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from jitmoe.jit.cache import writable_directory
from jitmoe.jit.render import render, templates_dir
from jitmoe.plan.plan import Plan

RUNTIME = Path(__file__).parent / "runtime"
_SOURCES = (
    "scheduler",
    "memory",
    "mbarrier",
    "stores",
    "rail",
    "warp",
    "wgmma",
    "cluster",
    "launches",
    "delays",
    "races",
    "main",
)
_COMMON = ("-std=c++17", "-w", "-fPIE", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-psabi")
_KERNEL_FLAGS = ("-O1", "-g1")
_RUNTIME_FLAGS = ("-O2", "-g1")
# Of the kernel in the checked build: every access is reported to runtime/races.cpp, which stands in
# for the runtime of ThreadSanitizer, and undefined behaviour ends the run.
_SANITIZERS = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr")
_CHECKED_FLAGS = ("-fsanitize=thread", *_SANITIZERS)
_CHECKED_LINK_FLAGS = ("-pie", *_SANITIZERS)
_BANNER = re.compile(r"^// ==== (.+) ====$")

# Behind the text: what runtime/main.cpp calls.
_TAIL = """
template <typename P>
void emu_call(void (*kernel)(P), const void* params) {{ kernel(*static_cast<const P*>(params)); }}
extern "C" void emu_kernel(const void* params) {{ emu_call({name}, params); }}
extern "C" {{
extern const emu::u32 emu_params_bytes, emu_checked;
const emu::u32 emu_params_bytes = sizeof(Params), emu_checked = {checked};
}}
"""

log = logging.getLogger("jitmoe")


class NoHostCompiler(RuntimeError):
    """No C++ compiler to emulate with."""


class HostCompileError(RuntimeError):
    """The host compiler refused the text; the message has its first lines."""


@cache
def compiler() -> tuple[str, ...]:
    """The command of the host C++ compiler. Raises NoHostCompiler."""
    if chosen := os.environ.get("CXX", "").strip():
        command = tuple(shlex.split(chosen))
        if shutil.which(command[0]) is None:
            raise NoHostCompiler(
                f"CXX is {chosen!r}, and there is no such program; set it to a C++ compiler, or "
                "unset it"
            )
        return command
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise NoHostCompiler(
        "emulation compiles the kernel for this CPU and found no C++ compiler: CXX is not set, "
        "g++ and clang++ are not on PATH; install one, or `pip install ziglang`"
    )


@cache
def compiler_version() -> str:
    """What the compiler says of itself; part of the cache key."""
    return _run([*compiler(), "--version"]).splitlines()[0]


def executable(plan: Plan, checked: bool = False) -> Path:
    """The emulated kernel of `plan`, built on first use; `checked` finds races and undefined
    behaviour, at several times the cost.

    Raises NoHostCompiler, HostCompileError.
    """
    return build(render(plan, layer="emulated"), plan.name, checked)


def build(text: str, name: str, checked: bool) -> Path:
    """The executable of the kernel `name` in `text`, which was rendered for the emulated layer."""
    runtime_key = _key(*(path.read_text() for path in sorted(RUNTIME.iterdir())))
    source = _with_line_numbers(text) + _TAIL.format(name=name, checked=int(checked))
    directory = _directory()
    path = directory / f"{name}-{_key(runtime_key, source)}"
    if path.exists():
        return path
    objects = [str(_runtime_object(directory, runtime_key, name)) for name in _SOURCES]
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        kernel = Path(aside, "kernel.cpp")
        kernel.write_text(source)
        include = ("-include", str(RUNTIME / "emulator.h"))
        flags = (*_COMMON, *_KERNEL_FLAGS, *(_CHECKED_FLAGS if checked else ()), *include)
        _run([*compiler(), *flags, "-c", str(kernel), "-o", f"{aside}/kernel.o"])
        link = _CHECKED_LINK_FLAGS if checked else ()
        _run([*compiler(), *link, f"{aside}/kernel.o", *objects, "-o", f"{aside}/kernel"])
        os.replace(f"{aside}/kernel", path)
    return path


def _runtime_object(directory: Path, runtime_key: str, name: str) -> Path:
    path = directory / f"runtime-{runtime_key}-{name}.o"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=directory) as aside:
            source = str(RUNTIME / f"{name}.cpp")
            flags = (*_COMMON, *_RUNTIME_FLAGS)
            _run([*compiler(), *flags, "-c", source, "-o", f"{aside}/object.o"])
            os.replace(f"{aside}/object.o", path)
    return path


@cache
def _session_directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="jitmoe-emulated-")


def _directory() -> Path:
    """Where executables live: in the kernel cache, or for this process only."""
    root = writable_directory()
    if root is None:
        return Path(_session_directory().name)
    directory = root / "emulated"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    flags = (*_COMMON, *_KERNEL_FLAGS, *_RUNTIME_FLAGS, *_CHECKED_FLAGS, *_CHECKED_LINK_FLAGS)
    for part in (compiler_version(), *flags, *parts):
        data = part.encode()
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:16]


def _with_line_numbers(text: str) -> str:
    """Errors and reports name the pasted file: a #line behind each banner and where a file ends."""
    lines, left = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        lines.append(line)
        if left:
            left -= 1
            if left == 0:
                lines.append(f'#line {number + 1} "kernel.cpp"')
        if match := _BANNER.match(line):
            pasted = templates_dir() / match[1]
            lines.append(f'#line 1 "templates/{match[1]}"')
            left = 0 if pasted.suffix == ".jinja" else pasted.read_text().count("\n")
    return "\n".join(lines)


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        first = "\n".join((result.stderr or result.stdout).splitlines()[:20])
        raise HostCompileError(f"{shlex.join(command)} failed:\n{first}")
    return result.stdout
