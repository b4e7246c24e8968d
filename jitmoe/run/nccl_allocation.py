"""One rank's part in a collective allocation by NCCL: its own memory, in a window of all ranks'."""

from __future__ import annotations

from contextlib import ExitStack

from jitmoe.run import nccl_library
from jitmoe.run.shared_memory import SharingDevice


class NcclAllocation:
    """Its steps are `create` on all ranks, then `register` on all; `close` at any time.

    communicator  of nccl4py
    node          ranks whose memory is mapped here; those of others have the address 0
    address       of the own memory, num_bytes long, as `create` maps it; a window maps it again
    """

    def __init__(self, device: SharingDevice, communicator, node: range):
        self._device, self._communicator, self._node = device, communicator, node
        self._buffer = self._window = None
        self.address = self.num_bytes = 0

    def create(self, num_bytes: int) -> None:
        """Allocate and zero the own memory: before `register` no other rank can write to it."""
        with self._device.current():
            self._buffer = nccl_library.load().mem_alloc(num_bytes, self._device.number)
        self.address, self.num_bytes = int(self._buffer.handle), num_bytes
        self._device.zero(self)

    def register(self) -> list[int]:
        """Collective in NCCL: addresses of all ranks' memory as the window maps it, by rank."""
        flag, num_ranks = nccl_library.load().WindowFlag, self._communicator.nranks
        flags = flag.COLL_SYMMETRIC
        if len(self._node) < num_ranks:  # what a signal tells of must have landed before it
            flags |= flag.STRICT_ORDERING
        with self._device.current():
            self._window = self._communicator.register_window(self._buffer, flags)
            if not self._window.handle:
                raise RuntimeError(
                    "NCCL made no window: the communicator must be blocking, its GPUs able to "
                    "access each other, and NCCL_WIN_ENABLE and NCCL_CUMEM_ENABLE not be 0"
                )
            bases = [0] * num_ranks
            for rank in self._node:
                bases[rank] = self._window.get_peer_device_pointer(rank)
        unmapped = [rank for rank in self._node if not bases[rank]]
        if unmapped:
            raise RuntimeError(f"NCCL maps no memory of ranks {unmapped} here")
        return bases

    @property
    def window(self) -> int:
        """NCCL's ncclWindow_t, once registered."""
        return self._window.handle

    def close(self) -> None:
        """Wait for the device, then let go of the window and the own memory: NCCL does both
        without the other ranks.
        """
        buffer, window, self._buffer, self._window = self._buffer, self._window, None, None
        with self._device.current(), ExitStack() as steps:  # all are taken even if one fails
            if buffer is not None:
                steps.callback(nccl_library.load().mem_free, buffer)
            if window is not None:
                steps.callback(window.close)
            steps.callback(self._device.synchronize)
