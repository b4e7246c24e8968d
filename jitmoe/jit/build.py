"""build(plan): the pipeline from plan to cubin on one page. Thread-safe; the page to read first."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from jitmoe import settings
from jitmoe.jit import cache, link, nvrtc, store
from jitmoe.jit.render import render
from jitmoe.plan.plan import Plan

log = logging.getLogger("jitmoe")


@dataclass(frozen=True)
class Built:
    """A kernel ready to be loaded, and where it came from.

    `origin` is "memory", "disk" or "compiled", `path` the cache entry (None: not on disk) and
    `seconds` what this call took.
    """

    plan: Plan
    key: str
    source: str
    cubin: nvrtc.Cubin
    origin: str
    seconds: float
    path: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.plan.name}-{self.key}"


# Called with (built, reason) after each compile, on the thread that compiled.
compile_listeners: list[Callable[[Built, str], None]] = []

_memo: dict[str, Built] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def build(plan: Plan) -> Built:
    """The kernel of `plan` from memory, from disk, or compiled: once, however many ask for it.

    Raises CompileError (ToolchainError if there is no NVRTC, or nothing to link with), RenderError,
    and ValueError for a setting of the wrong kind. No state of the disk raises.
    """
    start = time.perf_counter()
    source = render(plan)
    key = key_of(plan, source)
    with _lock_of(key):
        if built := _memo.get(key):
            built = replace(built, plan=plan, origin="memory")
        else:
            built = _memo[key] = _find_or_compile(plan, key, source)
            _print_plan(source)
    built = replace(built, seconds=time.perf_counter() - start)
    _dump(built)
    return built


def key_of(plan: Plan, source: str) -> str:
    """Under which the kernel of `plan`, whose text is `source`, is cached. Raises as `build`."""
    options = nvrtc.options() + link.inputs(plan.libraries)
    return cache.key(source, plan.arch, nvrtc.version(), options)


def _find_or_compile(plan: Plan, key: str, source: str) -> Built:
    if settings.get("JITMOE_NO_CACHE"):
        return _compile(plan, key, source, "JITMOE_NO_CACHE is set")
    found = cache.load(plan.name, key)
    if found.cubin is None:
        with cache.locked(plan.name, key):
            found = cache.load(plan.name, key)  # a peer may have built it while we waited
            if found.cubin is None:
                return _compile(plan, key, source, found.reason)
    return Built(plan, key, source, found.cubin, "disk", 0.0, found.path)


def _compile(plan: Plan, key: str, source: str, reason: str) -> Built:
    try:
        made = source, plan.arch, f"{plan.name}-{key}.cu"
        if plan.libraries:
            cubin = link.compile(*made, plan.name, plan.libraries)
        else:
            cubin = nvrtc.compile(*made)
        cubin.resources.check(plan, cubin.log)
    except nvrtc.ToolchainError:
        raise
    except nvrtc.CompileError as error:
        error.source = _dump_failure(f"{plan.name}-{key}", source, error.log)
        raise
    path = None
    if not settings.get("JITMOE_NO_CACHE"):
        facts = {"nvrtc": nvrtc.version(), "options": nvrtc.options()}
        if plan.libraries:
            facts["linked"] = link.inputs(plan.libraries)
        path = store.save(plan, key, source, cubin, facts)
    built = Built(plan, key, source, cubin, "compiled", cubin.seconds, path)
    where = path or "memory only"
    log.info("compiled %s in %.1f s (%s) -> %s", built.name, cubin.seconds, reason, where)
    for listener in list(compile_listeners):
        listener(built, reason)
    return built


@dataclass(frozen=True)
class Outcome:
    """What became of one plan of `build_many`: `built`, or the `error` that stopped it."""

    plan: Plan
    built: Built | None = None
    error: Exception | None = None


def build_many(plans: Iterable[Plan], jobs: int | None = None) -> Iterator[Outcome]:
    """Build `plans`, `jobs` at a time (default: one a CPU), and yield each as it is finished.

    A plan that fails is an outcome, not an exception. Threads do as well as processes here, for
    NVRTC runs without Python's lock: four kernels of 1.2 s take 2.6 s on 2 cores either way
    (2026-11-29).
    """
    plans = list(plans)
    workers = jobs or len(os.sched_getaffinity(0))
    executor = ThreadPoolExecutor(max(1, min(workers, len(plans))), "jitmoe-build")
    try:
        futures = {executor.submit(build, plan): plan for plan in plans}
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                yield Outcome(futures[future], future.result())
            elif isinstance(error, Exception):
                yield Outcome(futures[future], error=error)
            else:
                raise error
    finally:
        executor.shutdown(cancel_futures=True)


def _lock_of(key: str) -> threading.Lock:
    with _guard:
        return _locks.setdefault(key, threading.Lock())


def _forget_locks() -> None:
    """In a forked child: the threads that held the locks do not exist there."""
    global _guard
    _guard = threading.Lock()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _print_plan(source: str) -> None:
    """The tables at the head of the source say it all."""
    if settings.get("JITMOE_PRINT_PLAN"):
        head = takewhile(lambda line: line.startswith("//"), source.splitlines())
        print("\n".join(line[3:] for line in head), file=sys.stderr)


def _dump(built: Built) -> None:
    """Source, cubin and log for JITMOE_DUMP, whatever the kernel's origin. Never raises OSError."""
    directory = settings.get("JITMOE_DUMP")
    if directory:
        data = {".cu": built.source.encode(), ".cubin": built.cubin.data}
        data[".log"] = built.cubin.log.encode()
        try:
            _write_files(Path(directory), built.name, data)
        except OSError as error:
            log.warning("JITMOE_DUMP: %s cannot be written: %s", directory, error)


def _dump_failure(name: str, source: str, compiler_log: str) -> str:
    """Keep a source that failed, in JITMOE_DUMP or a new temporary folder; its path or ""."""
    try:
        directory = settings.get("JITMOE_DUMP") or tempfile.mkdtemp(prefix="jitmoe-failed-")
        data = {".cu": source.encode(), ".log": compiler_log.encode()}
        return str(_write_files(Path(directory), name, data))
    except OSError:
        return ""


def _write_files(directory: Path, name: str, data: dict[str, bytes]) -> Path:
    """Write `<name><suffix>` for each suffix, whole or not at all; the path of the first."""
    directory.mkdir(parents=True, exist_ok=True)
    for suffix, content in data.items():
        aside = directory / f".{name}{suffix}.{os.getpid()}-{threading.get_ident()}"
        try:
            aside.write_bytes(content)
            os.replace(aside, directory / f"{name}{suffix}")
        finally:
            aside.unlink(missing_ok=True)
    return directory / f"{name}{next(iter(data))}"
