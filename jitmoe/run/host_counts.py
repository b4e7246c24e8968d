"""Numbers that a kernel tells the host while it runs."""

from __future__ import annotations

from collections.abc import Callable


class HostCounts:
    """Two numbers of a launch in memory that both sides see."""

    def __init__(self):
        self._memory = self._words = None

    def clear(self) -> int:
        """Before a launch; returns the address for it. The launch before must have told its own."""
        if self._memory is None:
            import cupy

            self._memory = cupy.cuda.alloc_pinned_memory(8)
            self._words = memoryview(self._memory).cast("B")[:8].cast("I")
        self._words[0] = 0
        return self._memory.ptr

    def wait(self, check: Callable[[], None]) -> tuple[int, int]:
        """The numbers, once the launch has told them; meanwhile `check` may raise."""
        while self._words[0] == 0:
            check()
        return self._words[0] - 1, self._words[1]
