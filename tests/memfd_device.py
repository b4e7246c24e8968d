"""A stand-in for the GPU of jitmoe.run.shared_memory: memory files, mapped into each process."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import ExitStack, nullcontext

PAGE = mmap.PAGESIZE


class MemfdMapping:
    """As shared_memory.Mapping."""

    def __init__(self, device: MemfdDevice, file: int, num_bytes: int):
        self.handle, self.num_bytes, self.device = file, num_bytes, device
        self.undo = ExitStack()
        self.undo.callback(os.close, file)
        memory = mmap.mmap(file, num_bytes)
        self.undo.callback(memory.close)
        view = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(view)
        del view  # or the map could not be closed
        device.num_mapped += 1

    def close(self) -> None:
        self.device.num_mapped -= 1
        self.undo.close()


class MemfdDevice:
    """As shared_memory.SharingDevice; `broken` names calls that shall fail."""

    def __init__(self, device: int):
        self.number, self.uuid, self.has_vmm = device, f"GPU {device}", True
        self.num_mapped, self.broken, self.unreachable = 0, set(), set()

    def can_access(self, uuid: str) -> bool:
        return uuid not in self.unreachable

    def current(self):
        return nullcontext()

    def synchronize(self) -> None:
        self.do("synchronize")

    def zero(self, mapping) -> None:
        ctypes.memset(mapping.address, 0, mapping.num_bytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def memory(self, handles: str):
        return {"vmm": MemfdVmm, "ipc": MemfdIpc}[handles](self)

    def do(self, what: str) -> None:
        if what in self.broken:
            raise MemoryError(f"no {what} today")


class MemfdVmm:
    """As shared_memory.VmmMemory: files are handed over."""

    is_file = True

    def __init__(self, device: MemfdDevice):
        self._device = device

    def create(self, num_bytes: int) -> MemfdMapping:
        self._device.do("create")
        num_bytes = -(-num_bytes // PAGE) * PAGE
        file = os.memfd_create("symmetric")
        os.ftruncate(file, num_bytes)
        mapping = MemfdMapping(self._device, file, num_bytes)
        ctypes.memset(mapping.address, 0xFF, num_bytes)  # as new device memory may be
        return mapping

    def export(self, mapping: MemfdMapping) -> int:
        self._device.do("export")
        return os.dup(mapping.handle)

    def open(self, file: int, num_bytes: int) -> MemfdMapping:
        self._device.do("open")
        return MemfdMapping(self._device, os.dup(file), num_bytes)


class MemfdIpc(MemfdVmm):
    """As shared_memory.IpcMemory: bytes tell where to open the memory."""

    is_file = False

    def export(self, mapping: MemfdMapping) -> bytes:
        self._device.do("export")
        return f"/proc/{os.getpid()}/fd/{mapping.handle}".encode()

    def open(self, name: bytes, num_bytes: int) -> MemfdMapping:
        self._device.do("open")
        return MemfdMapping(self._device, os.open(name, os.O_RDWR), num_bytes)
