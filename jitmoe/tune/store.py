"""Rows of sweeps in a file, a line of JSON each, written one by one."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from jitmoe.tune.trial import KEY

# How a row begins (`trial.row_of`): only such a last line is taken for one that was cut off.
_START = b'{"bench": "tune"'


def load(path: Path | str) -> list[dict]:
    """The rows of a file. A last line that was cut off, as by a killed sweep, is left out. Raises
    ValueError naming file and line for one that is no row, and OSError.
    """
    return _rows(Path(path), Path(path).read_bytes())[0]


def _rows(path: Path, data: bytes) -> tuple[list[dict], int]:
    """Rows, and the bytes of whole lines: all, but for a last row that was cut off."""
    last = data.rfind(b"\n") + 1
    is_cut = data.startswith(_START[: len(data) - last], last) and not _is_json(data[last:])
    whole = last if is_cut else len(data)
    rows = []
    for number, line in enumerate(data[:whole].split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: not JSON: {error}; mend or remove the line, or take another file"
            ) from None
        missing = [
            name for name in (*KEY, "status") if not isinstance(row, dict) or name not in row
        ]
        if missing:
            raise ValueError(
                f"{path}:{number}: no row of a sweep, it lacks {', '.join(missing)}; take another "
                "file"
            )
        rows.append(row)
    return rows, whole


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class Store:
    """A file to resume and append to, locked while it is open; or memory alone, without a path.

    Raises ValueError for what is no store, or if another sweep has it open; OSError.
    """

    def __init__(self, path: Path | str | None):
        self.rows: list[dict] = []
        self._file = None
        if path is None:
            return
        path = Path(path)
        if not path.absolute().parent.is_dir():
            raise ValueError(f"store must lie in an existing folder, got {path}; create its folder")
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"another sweep writes {path}; wait for it or take another store"
            ) from None
        try:
            self._file.seek(0)
            data = self._file.read()
            self.rows, whole = _rows(path, data)
            self._file.truncate(whole)
            if whole and not data[:whole].endswith(b"\n"):
                self._file.write(b"\n")  # an editor took it off
        except BaseException:
            self._file.close()
            raise

    def append(self, row: dict) -> None:
        self.rows.append(row)
        if self._file is not None:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_) -> None:
        self.close()
