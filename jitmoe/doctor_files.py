"""What jitmoe keeps on disk, for `jitmoe doctor`: the kernel cache and tuned plans."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """`missing` is needed and fails the examination; `note` is worth knowing and does not."""

    status: Literal["ok", "note", "missing"]
    name: str
    text: str
    remedy: str = ""


def cache() -> Iterator[Finding]:
    from jitmoe import settings
    from jitmoe.jit.cache import directories

    if settings.get("JITMOE_NO_CACHE"):
        yield Finding("note", "cache", "off: JITMOE_NO_CACHE is set")
        return
    first, packs = directories()
    if first is None:
        yield Finding("note", "cache", "memory only: HOME is not set", _CACHE_REMEDY)
    else:
        yield _cache_directory(first)
    for pack in packs:
        text = f"{pack}, read only: {_contents(pack)}" if pack.is_dir() else f"{pack} is no folder"
        yield Finding("ok" if pack.is_dir() else "note", "cache pack", text)


_CACHE_REMEDY = "set JITMOE_CACHE_DIR to a writable folder of yours"


def _cache_directory(path: Path) -> Finding:
    """What is known without creating it."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        return Finding("note", "cache", f"memory only: {nearest} is no folder", _CACHE_REMEDY)
    if not os.access(nearest, os.W_OK | os.X_OK):
        text = f"memory only: {nearest} of user {_owner(nearest)} is not writable"
        return Finding("note", "cache", text, _CACHE_REMEDY)
    if nearest != path:
        return Finding("ok", "cache", f"{path}, to be created at first use")
    if path.stat().st_uid not in (os.geteuid(), 0):
        text = f"{path} belongs to user {_owner(path)} and is not used"
        return Finding("note", "cache", text, _CACHE_REMEDY)
    return Finding("ok", "cache", f"{path} of user {_owner(path)}, writable: {_contents(path)}")


def _contents(directory: Path) -> str:
    cubins = [path.stat().st_size for path in directory.glob("*/*.cubin")]
    return f"{len(cubins)} kernels, {sum(cubins):,} bytes of code"


def tuned_plans() -> Iterator[Finding]:
    from jitmoe import tuned

    if not tuned.files():
        yield Finding("note", "tuned plans", "off: JITMOE_TUNED is off")
    for path in tuned.files():
        damage, remedy = [], "remove the entry"
        try:
            num_plans = len(tuned.load(path, damage.append))
        except tuned.TunedFileError as error:
            num_plans, damage, remedy = None, [str(error)], f"{tuned.MEND} or set JITMOE_TUNED=off"
        where = "shipped" if path == tuned.SHIPPED else path
        if num_plans is not None:
            absent = "" if path.exists() else ", which is not there yet"
            yield Finding("ok", "tuned plans", f"{num_plans} of {where}{absent}")
        for reason in damage:
            yield Finding("note", "tuned plans", f"{path}: {reason}", remedy)


def _owner(path: Path) -> str:
    uid = path.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
