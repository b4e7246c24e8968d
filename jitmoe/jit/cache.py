"""The disk cache of compiled kernels: where it is, how a kernel is found, and who may build it.

    <cache>/<kernel>-<key>/   kernel.cu, kernel.cubin, plan.json, ptxas.log, checksum
    <cache>/.locks/           a lock file per kernel, never removed: a peer may hold it
    <cache>/.aside-*/         entries being written or removed; killed processes leave them behind

An entry is built aside and renamed into place. It is whole (`sha256sum -c checksum`) or it is a
miss: damage is said once and the entry replaced. Looking up writes nothing. Nothing here raises
because a disk is full, read-only or somebody else's: kernels then live in memory only, after one
warning.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jitmoe import settings
from jitmoe.jit.nvrtc import Cubin, parse_log

LOCK_TIMEOUT_S = 120.0  # a peer's compile takes seconds; then we compile too: it costs time only
_LOCK_POLL_S = 0.02
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
    packs = tuple(Path(os.path.expanduser(pack)).absolute() for pack in packs if pack)
    if first:
        return Path(os.path.expanduser(first)).absolute(), packs
    if (xdg := os.environ.get("XDG_CACHE_HOME", "")).startswith("/"):
        return Path(xdg, "jitmoe"), packs
    home = os.path.expanduser("~") if os.environ.get("HOME") != "" else ""
    return (Path(home, ".cache", "jitmoe") if home.startswith("/") else None), packs


def load(name: str, key: str) -> Lookup:
    """Look for a kernel in the directory, then in the packs. Writes nothing, never raises."""
    first, packs = directories()
    reason = f"not in {first}" if first else "no cache directory"
    for directory in (first, *packs):
        if directory is None or (directory is first and not is_trusted(directory)):
            continue
        path = directory / f"{name}-{key}"
        try:
            if directory is first and not is_trusted(path):
                continue
            return Lookup(_restore(read_entry(path)), path)
        except DamagedEntry as error:
            reason = f"entry damaged: {error}"
            say_once(str(path), "cached kernel %s is damaged and built again: %s", path, error)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            reason = f"{directory} cannot be read: {error.strerror}"
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

    Raises OSError if there is no entry that can be reached, DamagedEntry if it is not whole.
    """
    path.stat()
    try:
        files = {name: (path / name).read_bytes() for name in (CHECKSUM, *FILES)}
    except OSError as error:
        raise DamagedEntry(f"{error.strerror}: {error.filename}") from None
    check_files(files)
    return files


def check_files(files: dict[str, bytes]) -> None:
    """Raise DamagedEntry unless `files` are those that their checksum speaks of."""
    if files[CHECKSUM] != checksum_of(files):
        raise DamagedEntry("its checksum does not fit its files")


def checksum_of(files: dict[str, bytes]) -> bytes:
    return "".join(
        f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in FILES
    ).encode()


@contextmanager
def locked(name: str, key: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[bool]:
    """Hold a kernel's lock while building it, so that N ranks compile once; gives whether held.

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
        warn_unwritable(directory, error)
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
        warn_unwritable("(no home directory)", "HOME is not set")
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        warn_unwritable(directory, error)
        return None
    return directory if is_trusted(directory) else None


def is_trusted(path: Path) -> bool:
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


def warn_unwritable(directory: Path | str, error: OSError | str) -> None:
    say_once(
        "unwritable",
        "the kernel cache %s cannot be written (%s): kernels are kept in memory only and compiled "
        "again by the next process; set JITMOE_CACHE_DIR to a writable directory",
        directory,
        getattr(error, "strerror", None) or error,
    )
