"""A stand-in for nccl4py and NCCL: communicators of processes or threads that meet in a directory,
windows of memory files. Held to the real signatures by test_groups_nccl.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from types import ModuleType, SimpleNamespace

from directory_gather import DirectoryGather
from memfd_device import MemfdDevice, MemfdVmm

VERSION = "2.32.3"
_current = threading.local()  # number of the GPU whose context is the thread's


class Gpu(MemfdDevice):
    """As shared_memory.SharingDevice, and knows whether it is the current one.

    events  what was done to it, in order
    """

    def __init__(self, device: int):
        super().__init__(device)
        self.events: list[str] = []

    @contextmanager
    def current(self):
        before, _current.number = getattr(_current, "number", None), self.number
        try:
            yield
        finally:
            _current.number = before

    def synchronize(self) -> None:
        self.events.append("synchronize")
        super().synchronize()

    def zero(self, mapping) -> None:
        self.events.append("zero")
        super().zero(mapping)


class Machine:
    """What NCCL finds: GPUs by number, domains to which ranks belong by turns, or nodes of so many
    ranks one after the other, windows or none, and what reaches other nodes.
    """

    def __init__(self):
        self.gpus: dict[int, Gpu] = {}
        self.num_domains = 1
        self.nodes: tuple[int, ...] = ()
        self.has_windows = True
        self.gin, self.num_contexts = NcclGinType.GDAKI, 3
        self.bindings = VERSION

    def gpu(self, number: int) -> Gpu:
        return self.gpus.setdefault(number, Gpu(number))


class NcclGinType(IntEnum):
    NONE = 0
    PROXY = 2
    GDAKI = 3
    EFA_GDA = 5


class NcclGinConnectionType(IntEnum):
    NONE = 0
    RAIL = 2


machine = Machine()


class Version(str):
    """As packaging's."""

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(map(int, self.split(".")))


class WindowFlag(IntFlag):
    DEFAULT = 0
    COLL_SYMMETRIC = 1
    STRICT_ORDERING = 2


class UniqueId:
    def __init__(self, _internal=None):
        self._internal = _internal or b""

    def __bytes__(self) -> bytes:
        return self._internal

    @staticmethod
    def from_bytes(b) -> UniqueId:
        return UniqueId(b)


def get_unique_id(empty=False) -> UniqueId:
    return UniqueId(b"" if empty else tempfile.mkdtemp().encode())


def get_version():
    library = SimpleNamespace(version=Version(VERSION), path=Path("/somewhere/libnccl.so.2"))
    return SimpleNamespace(libnccl=library, nccl_bindings=Version(machine.bindings))


class Buffer:
    """As cuda.core's, as much of it as is used."""

    def __init__(self, gpu: Gpu, size: int):
        self.size, self.gpu = size, gpu
        self.mapping = MemfdVmm(gpu).create(size)  # filled with 0xFF
        self.handle = self.mapping.address


def mem_alloc(size, device=None) -> Buffer:
    assert device == _current.number
    return Buffer(machine.gpu(device), size)


def mem_free(buf) -> None:
    buf.gpu.events.append("free")
    buf.mapping.close()


class RegisteredWindowHandle:
    def __init__(self, gpu: Gpu, mappings: list):
        self._gpu, self.mappings = gpu, mappings

    @property
    def handle(self) -> int:
        return id(self) if machine.has_windows and self.mappings else 0

    def get_peer_device_pointer(self, peer, offset=0):
        mapping = self.mappings[peer]
        return mapping and mapping.address + offset

    def close(self) -> None:
        if self.mappings:
            self._gpu.events.append("close window")
        for mapping in self.mappings:
            if mapping:
                mapping.close()
        self.mappings = []


@dataclass(kw_only=True)
class NCCLDevCommRequirements:
    gin_context_count: int | None = None
    gin_connection_type: NcclGinConnectionType | None = None


class DevComm:
    """As the bindings'."""

    def __init__(self, gin_context_count: int):
        self.gin_context_count = gin_context_count

    def __bytes__(self) -> bytes:
        return b"device communicator"


class DevCommResource:
    def __init__(self, gpu: Gpu):
        self._gpu, self._dev_comm = gpu, DevComm(machine.num_contexts)

    @property
    def dev_comm(self) -> DevComm:
        return self._dev_comm

    def close(self) -> None:
        if self._dev_comm:
            self._gpu.events.append("close device communicator")
        self._dev_comm = None


class Communicator:
    def __init__(self, ptr=None):
        self._gather, self._gpu, self.windows, self.device_comms = None, None, [], []

    def initialize(self, nranks, rank, unique_id, config=None) -> None:
        self._gpu = machine.gpu(_current.number)
        self._gpu.do("initialize")
        self._gather = DirectoryGather(Path(bytes(unique_id).decode()), rank, nranks, 20)
        assert len(set(self._gather(self._gpu.uuid))) == nranks, "Duplicate GPU detected"

    @property
    def is_valid(self) -> bool:
        return self._gather is not None

    @property
    def rank(self) -> int:
        return self._gather.rank

    @property
    def nranks(self) -> int:
        return self._gather.num_ranks

    @property
    def device(self):
        return SimpleNamespace(device_id=self._gpu.number)

    @property
    def _node(self) -> range:
        first = 0
        for size in machine.nodes or (self.nranks,):
            if self.rank < first + size:
                return range(first, first + size)
            first += size

    @property
    def team_lsa(self):
        if machine.nodes:
            node = self._node
            return SimpleNamespace(n_ranks=len(node), rank=self.rank - node.start, stride=1)
        stride = machine.num_domains
        rank, size = self.rank // stride, self.nranks // stride
        return SimpleNamespace(n_ranks=size, rank=rank, stride=stride)

    def register_window(self, buffer, flags=None) -> RegisteredWindowHandle:
        wanted = WindowFlag.COLL_SYMMETRIC | (WindowFlag.STRICT_ORDERING if machine.nodes else 0)
        assert flags == wanted and self._gpu.number == _current.number
        own = f"/proc/{os.getpid()}/fd/{buffer.mapping.handle}"
        mappings = []
        for rank, name in enumerate(self._gather(own)):
            if rank not in self._node:
                mappings.append(None)
                continue
            mappings.append(MemfdVmm(self._gpu).open(file := os.open(name, os.O_RDWR), buffer.size))
            os.close(file)
        self._gather("mapped")
        self.windows.append(RegisteredWindowHandle(self._gpu, mappings))
        self._gpu.do("register_window")
        return self.windows[-1]

    @property
    def railed_gin_type(self) -> NcclGinType:
        return machine.gin

    def create_dev_comm(self, requirements=None) -> DevCommResource:
        assert requirements.gin_connection_type == NcclGinConnectionType.RAIL
        assert requirements.gin_context_count >= 1 and self._gpu.number == _current.number
        self._gather("create_dev_comm")
        self._gpu.do("create_dev_comm")
        self.device_comms.append(DevCommResource(self._gpu))
        return self.device_comms[-1]

    def abort(self) -> None:
        for resource in (*self.windows, *self.device_comms):
            resource.close()
        if self._gather:
            self._gpu.events.append("abort")
        self._gather = None


def install() -> None:
    """Be nccl.core in this process."""
    package = sys.modules["nccl"] = ModuleType("nccl")
    package.core = sys.modules["nccl.core"] = sys.modules[__name__]
