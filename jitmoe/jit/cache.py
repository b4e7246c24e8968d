"""The disk cache of compiled kernels: a directory per kernel, built aside and renamed into place.

    <cache>/<kernel>-<key>/   kernel.cu, kernel.cubin, plan.json, ptxas.log, checksum
    <cache>/.locks/           a lock file per kernel, never removed: a peer may hold it
    <cache>/.aside-*/         entries being written or removed; killed processes leave them behind

An entry is whole (`sha256sum -c checksum`) or it is a miss: damage is said once and the entry
replaced. Looking up writes nothing. Nothing here raises because a disk is full, read-only or
somebody else's: the kernel then lives in memory only, after one warning.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jitmoe import settings
from jitmoe.jit.nvrtc import Cubin, parse_log
from jitmoe.plan.plan import Plan

LOCK_TIMEOUT_S = 120.0  # a peer's compile takes seconds; then we compile too: it costs time only
_LOCK_POLL_S = 0.02
_STALE_ASIDE_S = 3600.0
ASIDE = ".aside-"
CHECKSUM = "checksum"
FILES = ("kernel.cu", "kernel.cubin", "plan.json", "ptxas.log")  # what the checksum covers

log = logging.getLogger("jitmoe")


class DamagedEntry(Exception):
    """An entry that lacks a file or whose bytes are not those that were stored."""


@dataclass(frozen=True)
class Lookup:
    """What a search found: `cubin` from the entry at `path`, or None and the `reason`."""

    cubin: Cubin | None
    path: Path | None = None
    reason: str = ""


def key(text: str, arch: str, nvrtc_version: str, options: Sequence[str]) -> str:
    """16 hex digits for everything a cubin depends on."""
    digest = hashlib.sha256()
    for part in (text, arch, nvrtc_version, *options):
        data = part.encode()
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:16]


def directories() -> tuple[Path | None, tuple[Path, ...]]:
    """The directory to write (None if no home directory is known) and the read-only packs."""
    first, *packs = str(settings.get("JITMOE_CACHE_DIR")).split(":")
    packs = tuple(Path(pack).expanduser().absolute() for pack in packs if pack)
    if first:
        return Path(first).expanduser().absolute(), packs
    if (xdg := os.environ.get("XDG_CACHE_HOME", "")).startswith("/"):
        return Path(xdg, "jitmoe"), packs
    home = os.environ.get("HOME", "") or os.path.expanduser("~")
    return (Path(home, ".cache", "jitmoe") if home.startswith("/") else None), packs


def load(name: str, key: str) -> Lookup:
    """Look for a kernel in the directory, then in the packs. Writes nothing, never raises."""
    first, packs = directories()
    reason = f"not in {first}" if first else "no cache directory"
    for directory in (first, *packs):
        if directory is None or (directory is first and not _is_trusted(directory)):
            continue
        path = directory / f"{name}-{key}"
        try:
            if directory is first and not _is_trusted(path):
                continue
            return Lookup(_restore(read_entry(path)), path)
        except FileNotFoundError:
            continue
        except (DamagedEntry, OSError) as error:
            reason = f"entry unusable: {error}"
            say_once(str(path), "cached kernel %s is unusable and built again: %s", path, error)
    return Lookup(None, None, reason)


def _restore(files: dict[str, bytes]) -> Cubin:
    try:
        compiler_log = files["ptxas.log"].decode()
        seconds = float(json.loads(files["plan.json"])["seconds"])
    except (KeyError, TypeError, ValueError) as error:  # whole, but not written by us
        raise DamagedEntry(f"its plan.json or ptxas.log cannot be read ({error!r})") from None
    return Cubin(files["kernel.cubin"], compiler_log, parse_log(compiler_log), seconds)


def read_entry(path: Path) -> dict[str, bytes]:
    """The files of an entry.

    Raises FileNotFoundError if there is no entry, DamagedEntry if it is not whole, OSError.
    """
    path.stat()
    try:
        files = {name: (path / name).read_bytes() for name in (CHECKSUM, *FILES)}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedEntry(f"{error.strerror}: {error.filename}") from None
    check_files(files)
    return files


def check_files(files: dict[str, bytes]) -> None:
    """Raise DamagedEntry unless `files` are those that their checksum speaks of."""
    if files[CHECKSUM] != _checksum(files):
        raise DamagedEntry("its checksum does not fit its files")


def _checksum(files: dict[str, bytes]) -> bytes:
    return "".join(
        f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in FILES
    ).encode()


def store(plan: Plan, key: str, source: str, cubin: Cubin, build: dict) -> Path | None:
    """Put a kernel into the directory; `build` (compiler, options) goes to plan.json for readers.

    Returns the entry's path, ours or that of a peer who was faster; None if it could not be
    written. Never raises OSError.
    """
    facts = {"name": plan.name, "key": key, "arch": plan.arch, "seconds": round(cubin.seconds, 3)}
    facts |= build | {"plan": {"class": type(plan).__name__} | asdict(plan)}
    files = {
        "kernel.cu": source.encode(),
        "kernel.cubin": cubin.data,
        "plan.json": (json.dumps(facts, indent=2, default=str) + "\n").encode(),
        "ptxas.log": cubin.log.encode(),
    }
    return store_files(f"{plan.name}-{key}", files | {CHECKSUM: _checksum(files)})


def store_files(entry: str, files: dict[str, bytes]) -> Path | None:
    """Write `files` as the entry called `entry`; as `store`."""
    directory = writable_directory()
    if directory is None:
        return None
    aside = None
    try:
        aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=directory))
        for name, data in files.items():
            (aside / name).write_bytes(data)
        _move_into_place(aside, directory / entry)
    except OSError as error:
        _warn_unwritable(directory, error)
        return None
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        _remove_stale(directory)
    return directory / entry


def _move_into_place(aside: Path, path: Path) -> None:
    """Rename `aside` to `path`, unless a whole entry is there already. Raises OSError."""
    for attempt in range(3):
        try:
            os.rename(aside, path)
            return
        except OSError as error:
            in_the_way = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
            if error.errno not in in_the_way or attempt == 2:
                raise
        with suppress(DamagedEntry, OSError):
            read_entry(path)
            return  # a peer was faster
        with suppress(FileNotFoundError):
            remove(path)


def remove(path: Path) -> None:
    """Take an entry away: aside first, so that no reader meets half of it. Raises OSError."""
    grave = Path(tempfile.mkdtemp(prefix=ASIDE, dir=path.parent))
    try:
        os.rename(path, grave / path.name)
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def _remove_stale(directory: Path) -> None:
    """What killed processes left. Never raises."""
    with suppress(OSError):
        for path in directory.glob(f"{ASIDE}*"):
            if time.time() - path.stat().st_mtime > _STALE_ASIDE_S:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(name: str, key: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[bool]:
    """Hold the lock of a kernel while building it, so that N ranks compile once; whether it is held.

    False (no locks on this disk, or a peer kept it for `timeout_s`) is no reason to stop: a lost
    race costs time only. The operating system drops the lock of a process that is killed.
    """
    file = _open_lock(f"{name}-{key}.lock")
    if file is None:
        yield False
        return
    try:
        held = _acquire(file, f"{name}-{key}", timeout_s)
        try:
            yield held
        finally:
            if held:  # closing would not do if a child was forked meanwhile: it shares the lock
                fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _open_lock(name: str) -> int | None:
    directory = writable_directory()
    if directory is None:
        return None
    try:
        locks = directory / ".locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        return os.open(locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _warn_unwritable(directory, error)
        return None


def _acquire(file: int, name: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    is_first = True
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR):
                return False  # a file system without locks
        if time.monotonic() >= deadline:
            log.warning(
                "a peer holds the lock of %s for over %.0f s; building too", name, timeout_s
            )
            return False
        if is_first:
            log.info("waiting for a peer that builds %s", name)
            is_first = False
        time.sleep(_LOCK_POLL_S)


def writable_directory() -> Path | None:
    """The directory to write, created if need be; None, after one warning, if there is none."""
    directory = directories()[0]
    if directory is None:
        _warn_unwritable("(no home directory)", "HOME is not set")
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _warn_unwritable(directory, error)
        return None
    return directory if _is_trusted(directory) else None


def _is_trusted(path: Path) -> bool:
    """Whether no other user could have put code there: it is ours, or root's, or not there."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return True
    if owner in (os.geteuid(), 0):
        return True
    say_once(
        str(path),
        "the kernel cache %s belongs to user %d and is not used: kernels are kept in memory only; "
        "set JITMOE_CACHE_DIR to a directory of yours",
        path,
        owner,
    )
    return False


_said: set[str] = set()


def say_once(topic: str, message: str, *args) -> None:
    if topic not in _said:
        _said.add(topic)
        log.warning(message, *args)


def _warn_unwritable(directory: Path | str, error: OSError | str) -> None:
    say_once(
        "unwritable",
        "the kernel cache %s cannot be written (%s): kernels are kept in memory only and compiled "
        "again by the next process; set JITMOE_CACHE_DIR to a writable directory",
        directory,
        getattr(error, "strerror", None) or error,
    )
