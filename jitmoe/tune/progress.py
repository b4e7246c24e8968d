"""How far a sweep is: a tqdm bar, in notebooks too, or a line now and then without tqdm."""

from __future__ import annotations

import time

LINE_S = 10.0  # between lines


class Progress:
    """Of `total` trials. Shows the best gain so far and the time left."""

    def __init__(self, total: int):
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._said, self._bar = 0.0, None
        self._point, self._gain, self._best = "", 0.0, ""
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=total, unit="plan")

    def step(self, row: dict) -> None:
        """After the trial of a row."""
        self._done += 1
        name = f"{row['shape']} {row['num_tokens']}"
        if name != self._point:
            self._point, self._gain, self._best = name, 0.0, ""
        if row["status"] == "ok" and not row["is_heuristic"] and row["gain"] > self._gain:
            self._gain = row["gain"]
            self._best = f"best {self._gain:+.1%} {row['changes']}"
        if self._bar is not None:
            self._bar.set_description(name)
            self._bar.set_postfix_str(self._best)
            self._bar.update()
        elif time.monotonic() - self._said >= LINE_S or self._done == self._total:
            self._said = time.monotonic()
            passed = self._said - self._start
            left = passed / self._done * (self._total - self._done)
            print(f"{self._done}/{self._total} {name}, {left:.0f} s left, {self._best}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
