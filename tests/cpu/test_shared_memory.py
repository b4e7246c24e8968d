"""Shared device memory over a driver that keeps books: whatever call fails, nothing is left."""

import ctypes
from collections import Counter
from types import SimpleNamespace

import pytest

from jitmoe.run import driver as real_driver
from jitmoe.run import shared_memory
from jitmoe.run.driver import DriverError

GRANULE = 1 << 16
# What ends what a call begins.
ENDS = {
    "cuMemCreate": "cuMemRelease",
    "cuMemImportFromShareableHandle": "cuMemRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
    "cuMemAlloc": "cuMemFree",
    "cuIpcOpenMemHandle": "cuIpcCloseMemHandle",
    "cuCtxPushCurrent": "cuCtxPopCurrent",
}
RESULTS = {
    "cuDeviceGetCount": 2,
    "cuMemGetAllocationGranularity": GRANULE,
    "cuMemExportToShareableHandle": 33,
    "cuMemAddressReserve": 1 << 40,
    "cuMemAlloc": 1 << 41,
    "cuIpcOpenMemHandle": 1 << 42,
}


class BookkeepingDriver:
    """`open` counts what was begun and not ended; `broken` names the call that fails."""

    def __init__(self):
        self.calls, self.open, self.broken, self.peers = [], Counter(), None, {(0, 1): 1}

    def __getattr__(self, name):
        if not name.startswith("cu"):
            return _Names(name)

        def function(*args):
            self.calls.append((name, args))
            if name == self.broken:
                return (2,)
            begun = {end: begin for begin, end in ENDS.items() if self.open[begin]}
            if name in ENDS:
                self.open[name] += 1
            elif name in ENDS.values():
                assert name in begun, f"{name} of nothing"
                self.open[begun[name]] -= 1
            return 0, self._result(name, args)

        function.__name__ = name
        return function

    def _result(self, name, args):
        if name == "cuDeviceGet":
            return args[0]
        if name == "cuDeviceGetAttribute":
            return int(args[0] != self.lacks)
        if name.startswith("cuDeviceGetUuid"):
            return SimpleNamespace(bytes=bytes([args[0]] * 16))
        if name == "cuDeviceCanAccessPeer":
            return self.peers.get(args, 0)
        if name == "cuIpcGetMemHandle":
            handle = CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
            return handle
        return RESULTS.get(name, name)

    lacks = None
    CUmemAllocationProp = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CUmemAccessDesc = CUmemAllocationProp
    cuGetErrorName = staticmethod(lambda status: (0, b"CUDA_ERROR_OUT_OF_MEMORY"))
    cuGetErrorString = staticmethod(lambda status: (0, b"out of memory"))

    @property
    def CUipcMemHandle(self):
        return CUipcMemHandle

    @property
    def CUipcMem_flags(self):
        return SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)


class CUipcMemHandle:
    def __init__(self):
        self.buffer = ctypes.create_string_buffer(64)

    def getPtr(self):
        return ctypes.addressof(self.buffer)


class _Names:
    """An enumeration whose members are their own names."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, member):
        return member


@pytest.fixture
def driver(monkeypatch):
    driver = BookkeepingDriver()
    monkeypatch.setattr(shared_memory, "driver", lambda: driver)
    monkeypatch.setattr(real_driver, "driver", lambda: driver)
    yield driver
    assert not +driver.open, "what was begun was not ended"


def open_something(memory, num_bytes: int):
    return memory.open(33 if memory.is_file else bytes(range(64)), num_bytes)


@pytest.mark.parametrize("handles", ["vmm", "ipc"])
def test_sizes_and_addresses(driver, handles):
    device = shared_memory.SharingDevice(0)
    assert device.has_vmm and device.uuid == "00" * 16
    memory = device.memory(handles)
    for mapping in (memory.create(GRANULE + 1), open_something(memory, 2 * GRANULE)):
        device.zero(mapping)
        granule = GRANULE if handles == "vmm" else 2 << 20
        assert mapping.num_bytes % GRANULE == 0 and mapping.address >= 1 << 40
        assert mapping.num_bytes == 2 * GRANULE or mapping.num_bytes == granule
        assert driver.calls[-3][1] == (mapping.address, 0, mapping.num_bytes)
        name = memory.export(mapping)
        assert name == (33 if handles == "vmm" else bytes(range(64)))
        mapping.close()


@pytest.mark.parametrize(
    "handles, act, call",
    [
        ("vmm", "create", "cuMemGetAllocationGranularity"),
        ("vmm", "create", "cuMemCreate"),
        ("vmm", "create", "cuMemAddressReserve"),
        ("vmm", "create", "cuMemMap"),
        ("vmm", "create", "cuMemSetAccess"),
        ("vmm", "open", "cuMemImportFromShareableHandle"),
        ("vmm", "open", "cuMemSetAccess"),
        ("ipc", "create", "cuMemAlloc"),
        ("ipc", "open", "cuIpcOpenMemHandle"),
    ],
)
def test_nothing_is_left_of_what_failed(driver, handles, act, call):
    memory = shared_memory.SharingDevice(0).memory(handles)
    driver.broken = call
    with pytest.raises(DriverError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.create(5) if act == "create" else open_something(memory, GRANULE)
    assert (call,) == tuple(name for name, _ in driver.calls if name == call)


def test_one_failure_of_closing_does_not_stop_the_rest(driver):
    mapping = shared_memory.SharingDevice(0).memory("vmm").create(5)
    driver.broken = "cuMemUnmap"
    with pytest.raises(DriverError, match="cuMemUnmap"):
        mapping.close()
    assert [name for name, _ in driver.calls[-4:]] == [
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
        "cuCtxPopCurrent",
    ]
    driver.open.clear()


def test_access(driver):
    """Asked of the driver by number, for GPUs that can be seen; the rest is tried."""
    first, second = (shared_memory.SharingDevice(number) for number in (0, 1))
    assert first.can_access(second.uuid) and not second.can_access(first.uuid)
    assert second.can_access(second.uuid) and second.can_access("of a hidden GPU")


@pytest.mark.parametrize(
    "lacks", ["VIRTUAL_MEMORY_MANAGEMENT", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"]
)
def test_gpus_without_handles_that_are_files(driver, lacks):
    driver.lacks = f"CU_DEVICE_ATTRIBUTE_{lacks}_SUPPORTED"
    assert not shared_memory.SharingDevice(0).has_vmm
