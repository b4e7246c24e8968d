"""One rank's part in a collective allocation: its own memory, and the others' mapped here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from jitmoe.run.file_handover import FileHandover
from jitmoe.run.shared_memory import Mapping, SharingDevice

Ticket = tuple[int, str | bytes]  # bytes of an allocation as mapped, and where or how to open it


class SharedAllocation:
    """Its steps are `create` on all ranks, then `open` on all ranks; `close` at any time.

    handles    "vmm" or "ipc", see shared_memory.py
    timeout_s  seconds that handing file descriptors around may take
    """

    def __init__(
        self, device: SharingDevice, handles: str, rank: int, num_ranks: int, timeout_s: float
    ):
        self._device, self._memory = device, device.memory(handles)
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, timeout_s
        self._handover: FileHandover | None = None
        self._own: Mapping | None = None
        self._others = ExitStack()

    def create(self, num_bytes: int) -> Ticket:
        """Allocate and zero the own memory. Returns what the other ranks need to open it."""
        self._own = self._memory.create(num_bytes)
        self._device.zero(self._own)
        if not self._memory.is_file:
            return self._own.num_bytes, self._memory.export(self._own)
        self._handover = FileHandover(self._rank, self._num_ranks, self._timeout_s)
        return self._own.num_bytes, self._handover.address

    def open(self, tickets: Sequence[Ticket]) -> list[int]:
        """Map the memory of the other ranks, whose `tickets` are by rank. Returns all addresses."""
        bases = [self._own.address] * self._num_ranks
        with self._names(tickets) as names:
            for rank, (num_bytes, _) in enumerate(tickets):
                if rank != self._rank:
                    mapping = self._memory.open(names[rank], num_bytes)
                    self._others.callback(mapping.close)
                    bases[rank] = mapping.address
        return bases

    @contextmanager
    def _names(self, tickets: Sequence[Ticket]) -> Iterator[list]:
        """What opens the memory of each rank: bytes, or open files."""
        if self._handover is None:
            yield [name for _, name in tickets]
            return
        with ExitStack() as files:
            own = self._memory.export(self._own)
            files.callback(os.close, own)
            names = self._handover.exchange(own, [address for _, address in tickets])
            for file in names:
                if file is not None:
                    files.callback(os.close, file)
            yield names

    def stop_listening(self) -> None:
        """Once no rank has to be handed anything any more."""
        if self._handover is not None:
            self._handover.close()

    def close_others(self) -> None:
        """Let go of the other ranks' memory."""
        self._others.close()

    def close_own(self) -> None:
        """Let go of the own memory."""
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def close(self) -> None:
        """Wait for the device, then let go of all memory."""
        with ExitStack() as steps:  # all are taken even if one fails
            steps.callback(self.close_own)
            steps.callback(self.close_others)
            steps.callback(self.stop_listening)
            self._device.synchronize()
