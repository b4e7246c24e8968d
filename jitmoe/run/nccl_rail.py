"""The rail of a group over several nodes: NCCL's device communicator with GIN, in device memory."""

from __future__ import annotations

import re
from contextlib import ExitStack

from jitmoe.jit import link
from jitmoe.run import nccl_library
from jitmoe.run.shared_memory import SharingDevice

# GIN contexts asked for, which warps share: NCCL's default. Not measured, nor is another number.
NUM_CONTEXTS = 4
_COMM_AT = 64  # of templates/device/rail_gin.cuh, kGinCommAt: behind the number of contexts
_REMEDY = "or make a group of each NVLink domain"


class NcclRail:
    """One rank's device communicator. `check` on all ranks, then `create` on all; `close` at any
    time.

    communicator  of nccl4py
    address       of device memory: a u32, the number of GIN contexts, and NCCL's ncclDevComm from
                  byte 64 on (NCCL User Guide, "Device API - Host-Side Setup")
    """

    def __init__(self, device: SharingDevice, communicator):
        self._device, self._communicator = device, communicator
        self._comm = self._buffer = None
        self.address = 0

    def check(self) -> None:
        """Raise RuntimeError unless NCCL reaches other nodes from a kernel, by GIN, and its library
        and bindings fit the device library.
        """
        nccl_library.check_rail()
        core = nccl_library.load()
        ours, bindings = _device_release(), core.get_version().nccl_bindings.release
        if ours != bindings:  # the communicator's layout differs between patches, as 2.32.3 and .4
            text = _text(bindings)
            raise RuntimeError(
                f"nccl4py asks for a device communicator of NCCL {text}, and the device library "
                f"that kernels are linked with is of {_text(ours)}; pip install "
                f"nvidia-nccl-cu12=={text} (-cu13 for CUDA 13), or the nccl4py of {_text(ours)}"
            )
        kinds, kind = core.NcclGinType, self._communicator.railed_gin_type
        if kind == kinds.NONE:
            raise RuntimeError(
                "NCCL finds no GIN between nodes (railed_gin_type is NONE); it needs network cards "
                f"with GPUDirect RDMA, and NCCL_GIN_ENABLE not 0; mend that, {_REMEDY}"
            )
        if kind == kinds.EFA_GDA:
            raise RuntimeError(
                "GIN is by EFA_GDA, whose signals do not wait for what was put before; set "
                f"NCCL_GIN_TYPE=2 to take its proxy, {_REMEDY}"
            )

    def create(self) -> None:
        """Collective in NCCL."""
        core = nccl_library.load()
        wanted = core.NCCLDevCommRequirements(
            gin_context_count=NUM_CONTEXTS, gin_connection_type=core.NcclGinConnectionType.RAIL
        )
        with self._device.current():
            self._comm = self._communicator.create_dev_comm(wanted)
            comm = self._comm.dev_comm
            if comm.gin_context_count < 1:
                raise RuntimeError("NCCL made a device communicator without GIN contexts")
            head = comm.gin_context_count.to_bytes(4, "little").ljust(_COMM_AT, b"\0")
            data = head + bytes(comm)
            self._buffer = core.mem_alloc(len(data), self._device.number)
        self._device.write(int(self._buffer.handle), data)
        self.address = int(self._buffer.handle)

    def close(self) -> None:
        """Wait for the device, then let go of the communicator and its copy."""
        buffer, comm, self._buffer, self._comm = self._buffer, self._comm, None, None
        self.address = 0
        with self._device.current(), ExitStack() as steps:  # all are taken even if one fails
            if buffer is not None:
                steps.callback(nccl_library.load().mem_free, buffer)
            if comm is not None:
                steps.callback(comm.close)
            steps.callback(self._device.synchronize)


def _device_release() -> tuple[int, ...]:
    """Of the device library, by the header beside it. Raises ToolchainError without one."""
    header = link.find("nccl_device").parents[1] / "include" / "nccl.h"
    text = header.read_text(errors="replace")
    parts = "MAJOR", "MINOR", "PATCH"
    found = [re.search(rf"#define NCCL_{part} (\d+)", text) for part in parts]
    if not all(found):
        raise RuntimeError(f"{header} tells no version; install NCCL's wheel again")
    return tuple(int(match[1]) for match in found)


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
