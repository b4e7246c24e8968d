"""Trace: a traced launch, and what can be made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jitmoe.tracing import perfetto, plot
from jitmoe.tracing.events import Timeline
from jitmoe.tracing.summary import Summary, summarize


@dataclass(frozen=True, eq=False)
class Trace(Timeline):
    """What every warp of a launch did, and what it waited for; `jitmoe.trace` makes it.

    `events` is a structured array with the fields of `tracing.events.EVENT_DTYPE`. A wait is an
    event if its first look was in vain.
    """

    def to_perfetto(self, path: Path | str) -> None:
        """Write JSON for ui.perfetto.dev or chrome://tracing. Raises OSError."""
        perfetto.write(self, path)

    def summary(self) -> Summary:
        """How busy roles are, what they wait for, how the launch starts and ends."""
        return summarize(self)

    def plot(self, path: Path | str, block: int = 0) -> None:
        """Write a PNG of every warp of `block` and of math in every block.

        Raises ImportError without matplotlib, ValueError for a block that does not exist, OSError.
        """
        plot.draw(self, path, block)
