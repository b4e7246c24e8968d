"""Writing to the cache of compiled kernels, and the cache as a whole: list, verify, clear, pack."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jitmoe.jit import cache
from jitmoe.jit.cache import CHECKSUM, FILES, DamagedEntry, check_files, checksum_of, read_entry
from jitmoe.jit.nvrtc import Cubin
from jitmoe.plan.plan import Plan

_ENTRY = re.compile(r"[A-Za-z_]\w*-[0-9a-f]{16}", re.ASCII)
_ASIDE = ".aside-"
_STALE_ASIDE_S = 3600.0
_MAX_FILE_BYTES = 256 << 20


class CacheError(RuntimeError):
    """A pack that cannot be imported, or no directory to work on."""


def save(plan: Plan, key: str, source: str, cubin: Cubin, facts: dict) -> Path | None:
    """Put a kernel into the cache; `facts` (compiler, options) go to plan.json for readers.

    Returns the entry's path, ours or that of a peer who was faster; None if it could not be
    written. Never raises OSError.
    """
    head = {"name": plan.name, "key": key, "arch": plan.arch, "seconds": round(cubin.seconds, 3)}
    document = head | facts | {"plan": {"class": type(plan).__name__} | asdict(plan)}
    files = {
        "kernel.cu": source.encode(),
        "kernel.cubin": cubin.data,
        "plan.json": (json.dumps(document, indent=2, default=str) + "\n").encode(),
        "ptxas.log": cubin.log.encode(),
    }
    return _save_files(f"{plan.name}-{key}", files | {CHECKSUM: checksum_of(files)})


def _save_files(entry: str, files: dict[str, bytes]) -> Path | None:
    directory = cache.writable_directory()
    if directory is None:
        return None
    aside = None
    try:
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=directory))
        for name, data in files.items():
            (aside / name).write_bytes(data)
        _move_into_place(aside, directory / entry)
    except OSError as error:
        cache.warn_unwritable(directory, error)
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
            if cache.is_trusted(path):
                read_entry(path)
                return  # a peer was faster
        with suppress(FileNotFoundError):
            _remove(path)


def _remove(path: Path) -> None:
    """Take an entry away: aside first, so that no reader meets half of it. Raises OSError."""
    grave = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=path.parent))
    try:
        os.rename(path, grave / path.name)
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def _remove_stale(directory: Path, age_s: float = _STALE_ASIDE_S) -> None:
    """What killed processes left. Never raises."""
    with suppress(OSError):
        for path in directory.glob(f"{_ASIDE}*"):
            if time.time() - path.stat().st_mtime >= age_s:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Entry:
    """A kernel on disk; `facts` is its plan.json, `problem` what is wrong with it ("" if whole)."""

    path: Path
    num_bytes: int
    created: float
    facts: dict
    problem: str = ""

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Info:
    """The directories, the count of their entries, damaged ones too, and the bytes of these."""

    directory: Path | None
    is_writable: bool
    packs: tuple[Path, ...]
    num_entries: int
    num_bytes: int


def info() -> Info:
    """What `jitmoe cache info` prints. Writes nothing."""
    first, packs = cache.directories()
    place = first
    while place is not None and not place.exists() and place != place.parent:
        place = place.parent  # the nearest that exists decides whether ours can be made
    is_writable = place is not None and place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    found = list(entries())
    num_bytes = sum(entry.num_bytes for entry in found)
    is_writable = is_writable and cache.is_trusted(first)
    return Info(first, is_writable, packs, len(found), num_bytes)


def entries() -> Iterator[Entry]:
    """Every entry of the directory and the packs, read and checked, by name. Writes nothing."""
    first, packs = cache.directories()
    for directory in (first, *packs):
        paths = []
        with suppress(OSError):
            if directory is not None:
                paths = sorted(p for p in directory.iterdir() if _ENTRY.fullmatch(p.name))
        for path in paths:
            with suppress(FileNotFoundError):  # a peer has just removed it
                yield _examine(path)


def _examine(path: Path) -> Entry:
    created = path.stat().st_mtime
    try:
        files = read_entry(path)
        facts = json.loads(files["plan.json"])
        return Entry(path, sum(map(len, files.values())), created, facts)
    except FileNotFoundError:
        raise
    except (DamagedEntry, OSError, ValueError) as error:
        num_bytes = 0
        with suppress(OSError):
            num_bytes = sum(file.stat().st_size for file in path.iterdir())
        return Entry(path, num_bytes, created, {}, str(error))


def verify() -> list[Entry]:
    """The damaged entries. Writes nothing."""
    return [entry for entry in entries() if entry.problem]


def clear(older_than_s: float = 0.0) -> int:
    """Remove the directory's entries made more than `older_than_s` ago; how many went.

    Packs and lock files stay. Raises OSError for an entry that cannot be removed.
    """
    first, _ = cache.directories()
    old = [
        entry
        for entry in entries()
        if entry.path.parent == first and time.time() - entry.created >= older_than_s
    ]
    for entry in old:
        _remove(entry.path)
    if first is not None:
        _remove_stale(first)
    return len(old)


def export(path: Path | str) -> int:
    """Write the whole entries of the directory and the packs to the archive `path` (.tar.gz).

    Returns their number. Raises OSError.
    """
    path = Path(path)
    done = set()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tarfile.open(aside, "w:gz") as archive:
            for entry in entries():
                if entry.problem or entry.name in done:
                    continue
                with suppress(DamagedEntry, FileNotFoundError):  # a peer has just removed it
                    for file, data in read_entry(entry.path).items():
                        member = tarfile.TarInfo(f"{entry.name}/{file}")
                        member.size, member.mode = len(data), 0o644
                        archive.addfile(member, io.BytesIO(data))
                    done.add(entry.name)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return len(done)


def import_(path: Path | str) -> int:
    """Add the kernels of an archive written by `export` to the directory; how many were stored.

    A pack is code: import only what you would run. Nothing is stored unless the whole archive is
    sound. Raises CacheError for an archive that holds anything but whole entries, or if the
    directory cannot be written; OSError if the archive cannot be read.
    """
    found: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                entry, slash, file = member.name.partition("/")
                is_known = _ENTRY.fullmatch(entry) and file in (CHECKSUM, *FILES)
                if not (is_known and member.isreg() and member.size <= _MAX_FILE_BYTES):
                    raise CacheError(f"{path} is no pack of kernels: it holds {member.name!r}")
                found.setdefault(entry, {})[file] = archive.extractfile(member).read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise CacheError(f"{path} is no pack of kernels: {error}") from None
    for entry, files in found.items():
        try:
            check_files(files)
        except (DamagedEntry, KeyError) as error:
            raise CacheError(f"{path} is damaged: {entry}: {error}") from None
    for entry, files in found.items():
        if _save_files(entry, files) is None:
            raise CacheError(
                "the cache cannot be written; set JITMOE_CACHE_DIR to a directory of yours"
            )
    return len(found)
