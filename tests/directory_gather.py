"""An all_gather of ranks that share nothing but a directory."""

from __future__ import annotations

import pickle
import time
from pathlib import Path


class DirectoryGather:
    """all_gather of processes that can write to the same directory."""

    def __init__(self, directory: Path, rank: int, num_ranks: int, timeout_s: float = 60.0):
        self.directory, self.rank, self.num_ranks = directory, rank, num_ranks
        self.timeout_s, self.number = timeout_s, 0

    def __call__(self, obj) -> list:
        self.number += 1
        mine = self._file(self.rank)
        mine.with_suffix(".new").write_bytes(pickle.dumps(obj))
        mine.with_suffix(".new").rename(mine)
        end = time.monotonic() + self.timeout_s
        files = [self._file(rank) for rank in range(self.num_ranks)]
        while not all(file.exists() for file in files):
            if time.monotonic() > end:
                raise TimeoutError(f"not all of {self.num_ranks} ranks have come")
            time.sleep(0.01)
        return [pickle.loads(file.read_bytes()) for file in files]

    def _file(self, rank: int) -> Path:
        return self.directory / f"{self.number}-{rank}"
