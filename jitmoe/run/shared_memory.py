"""Device memory that processes share: made by one, opened by others, through the driver alone.

Handles are of two kinds. "vmm": memory of cuMemCreate, told by a file descriptor, alive until the
last process lets go of it. "ipc": memory of cuMemAlloc, told by 64 bytes; what others see once its
owner freed it is undefined.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from jitmoe.run.driver import call, driver

_IPC_BYTES = 64
_IPC_GRANULE = 2 << 20  # smaller allocations share a block, which an IPC handle opens as a whole


@dataclass
class Mapping:
    """Device memory as mapped in this process.

    num_bytes  as mapped, at least what was asked for
    handle     what `export` takes
    """

    address: int
    num_bytes: int
    handle: object
    device: SharingDevice
    undo: ExitStack

    def close(self) -> None:
        with self.device.current():
            self.undo.close()


class SharingDevice:
    """A GPU, as much of it as sharing memory needs.

    uuid     names the GPU in all processes
    has_vmm  whether its memory can be told by file descriptors
    """

    def __init__(self, device: int):
        module = driver()
        call(module.cuInit, 0)
        self.number = device
        self._device = call(module.cuDeviceGet, device)
        # Kept until the process ends, as the runtime keeps it.
        self._context = call(module.cuDevicePrimaryCtxRetain, self._device)
        self.uuid = _uuid(self._device)
        attribute = module.CUdevice_attribute
        self.has_vmm = all(
            call(module.cuDeviceGetAttribute, wanted, self._device)
            for wanted in (
                attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )
        )

    def can_access(self, uuid: str) -> bool:
        """Whether this GPU can read and write the memory of the one of that uuid.

        True for one that CUDA_VISIBLE_DEVICES hides: only mapping its memory will tell.
        """
        module = driver()
        if uuid == self.uuid:
            return True
        for number in range(call(module.cuDeviceGetCount)):
            other = call(module.cuDeviceGet, number)
            if uuid == _uuid(other):
                return bool(call(module.cuDeviceCanAccessPeer, self._device, other))
        return True

    @contextmanager
    def current(self) -> Iterator[None]:
        """The GPU's context is the thread's meanwhile."""
        module = driver()
        call(module.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            call(module.cuCtxPopCurrent)

    def synchronize(self) -> None:
        with self.current():
            call(driver().cuCtxSynchronize)

    def zero(self, mapping: Mapping) -> None:
        """Fill with zeros, and wait."""
        with self.current():
            call(driver().cuMemsetD8, mapping.address, 0, mapping.num_bytes)
            call(driver().cuCtxSynchronize)

    def write(self, address: int, data: bytes) -> None:
        """Copy `data` to memory of this GPU, and wait."""
        with self.current():
            call(driver().cuMemcpyHtoD, address, data, len(data))
            call(driver().cuCtxSynchronize)

    def memory(self, handles: str) -> VmmMemory | IpcMemory:
        """Memory of this GPU with handles of that kind."""
        return {"vmm": VmmMemory, "ipc": IpcMemory}[handles](self)


class VmmMemory:
    """Memory whose handles are file descriptors."""

    is_file = True

    def __init__(self, device: SharingDevice):
        module = driver()
        self._device = device
        self._file = module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        location = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = properties = module.CUmemAllocationProp()
        properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type, properties.location.id = location, device.number
        properties.requestedHandleTypes = self._file
        self._access = access = module.CUmemAccessDesc()
        access.location.type, access.location.id = location, device.number
        access.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def create(self, num_bytes: int) -> Mapping:
        """New memory of this GPU."""
        module = driver()
        wanted = module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        with self._device.current():
            granule = call(module.cuMemGetAllocationGranularity, self._properties, wanted)
            num_bytes = _round_up(num_bytes, granule)
            handle = call(module.cuMemCreate, num_bytes, self._properties, 0)
            return self._map(handle, num_bytes)

    def export(self, mapping: Mapping) -> int:
        """A file descriptor, the caller's to close, by which other processes open the memory."""
        return call(driver().cuMemExportToShareableHandle, mapping.handle, self._file, 0)

    def open(self, file: int, num_bytes: int) -> Mapping:
        """Another process's memory of `num_bytes` as mapped there. `file` may be closed after."""
        with self._device.current():
            handle = call(driver().cuMemImportFromShareableHandle, file, self._file)
            return self._map(handle, num_bytes)

    def _map(self, handle, num_bytes: int) -> Mapping:
        module = driver()
        with ExitStack() as undo:
            undo.callback(call, module.cuMemRelease, handle)
            address = call(module.cuMemAddressReserve, num_bytes, 0, 0, 0)
            undo.callback(call, module.cuMemAddressFree, address, num_bytes)
            call(module.cuMemMap, address, num_bytes, 0, handle, 0)
            undo.callback(call, module.cuMemUnmap, address, num_bytes)
            call(module.cuMemSetAccess, address, num_bytes, [self._access], 1)
            return Mapping(int(address), num_bytes, handle, self._device, undo.pop_all())


class IpcMemory:
    """Memory whose handles are bytes. A process cannot open its own."""

    is_file = False

    def __init__(self, device: SharingDevice):
        self._device = device

    def create(self, num_bytes: int) -> Mapping:
        """New memory of this GPU."""
        num_bytes = _round_up(num_bytes, _IPC_GRANULE)
        with self._device.current():
            address = call(driver().cuMemAlloc, num_bytes)
        return self._mapping(address, num_bytes, driver().cuMemFree)

    def export(self, mapping: Mapping) -> bytes:
        """Bytes by which other processes open the memory."""
        with self._device.current():
            handle = call(driver().cuIpcGetMemHandle, mapping.handle)
        return ctypes.string_at(handle.getPtr(), _IPC_BYTES)

    def open(self, name: bytes, num_bytes: int) -> Mapping:
        """Another process's memory of `num_bytes` as mapped there."""
        module = driver()
        handle = module.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), name, _IPC_BYTES)
        flag = module.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self._device.current():
            address = call(module.cuIpcOpenMemHandle, handle, int(flag))
        return self._mapping(address, num_bytes, module.cuIpcCloseMemHandle)

    def _mapping(self, address, num_bytes: int, close) -> Mapping:
        undo = ExitStack()
        undo.callback(call, close, address)
        return Mapping(int(address), num_bytes, address, self._device, undo)


def _uuid(device) -> str:
    module = driver()
    # Bindings of CUDA 13 have the second version, which tells parts of a GPU apart, by the name of
    # the first.
    get = getattr(module, "cuDeviceGetUuid_v2", module.cuDeviceGetUuid)
    return call(get, device).bytes.hex()


def _round_up(num_bytes: int, granule: int) -> int:
    return -(-num_bytes // granule) * granule
