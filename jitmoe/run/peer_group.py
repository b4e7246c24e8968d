"""PeerGroup: one process for each rank, all on one host, their memory mapped into each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from jitmoe.run.meeting import Meeting
from jitmoe.run.process_group import ProcessGroup
from jitmoe.run.ranks import RankError, RankMismatch, check_nodes, name_ranks
from jitmoe.run.shared_allocation import SharedAllocation
from jitmoe.run.shared_memory import SharingDevice
from jitmoe.run.symmetric import device_number

# What ranks must have alike beside what those of any group must, and the remedies.
_REMEDIES = {
    "host": "a PeerGroup is of one host, seen as one by all its processes",
    "user": "run all as one user",
    "handles": "pass the same to all",
    "nodes": "pass the same to all",
}


class PeerGroup(ProcessGroup):
    """One rank of a group of processes on one host; making it is collective.

    rank        this process's number, from 0 on
    num_ranks   processes of the group, 1 to 64; several may share a GPU
    all_gather  all_gather(obj) -> the objects of all ranks, by rank: any collective of the
                caller's, for picklable objects; a rank that dies is its to notice
    device      CUDA device number (default: CuPy's current device)
    handles     how memory is shared: "vmm" (file descriptors of cuMemCreate), "ipc" (CUDA IPC), or
                None for vmm where all ranks' GPUs have it
    timeout_s   seconds that handing file descriptors around may take
    nodes       1, or for dispatch and combine 2 to 32, of as many ranks each, one after the other:
                a token then goes once to a node, as is best where a host has several NVLink
                domains, and to test what runs over a network between hosts

    Raises on all ranks RankMismatch, by name of the ranks, for different hosts, users or versions
    of jitmoe, a rank number that occurs twice, or GPUs that cannot access each other, and RankError
    for whatever fails on one of them; ValueError for nodes that do not share out the ranks.
    """

    _by_hand = "PeerGroup"

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[object], Sequence],
        device: int | None = None,
        handles: str | None = None,
        timeout_s: float = 30.0,
        nodes: int = 1,
    ):
        check_nodes(num_ranks, nodes, None)
        self.num_nodes = nodes
        super().__init__(Meeting(rank, num_ranks, all_gather, "PeerGroup"))
        self._timeout_s = timeout_s
        describe = partial(self._describe, device, handles)
        facts = self._meeting.introduce(describe, _REMEDIES)
        without = [fact["rank"] for fact in facts if not fact["has_vmm"]]
        if handles == "vmm" and without:
            raise RankMismatch(
                f'the GPU of {name_ranks(without)} cannot share memory with handles="vmm"; '
                'take handles="ipc" or None'
            )
        gpus = [fact["gpu"] for fact in facts]
        unreachable = self._meeting.together(
            "ask which GPUs can access each other",
            lambda: [r for r, gpu in enumerate(gpus) if not self._device.can_access(gpu)],
        )
        if any(unreachable):
            pairs = [
                f"that of rank {r} cannot access that of {name_ranks(there)}"
                for r, there in enumerate(unreachable)
                if there
            ]
            raise RankMismatch(
                f"GPUs must access each other's memory, and {', '.join(pairs)}; "
                "take GPUs joined by NVLink, or by PCIe with peer access"
            )
        self.handles = handles or ("ipc" if without else "vmm")

    @classmethod
    def _connect(cls, rank, num_ranks, all_gather, device, **options) -> Self:
        return cls(rank, num_ranks, all_gather, device, **options)

    def _share(self, num_bytes: int) -> tuple[Sequence[int], Callable[[], None]]:
        share = SharedAllocation(
            self._device, self.handles, self.rank, self.num_ranks, self._timeout_s
        )
        together = self._meeting.together
        with ExitStack() as undo:
            undo.callback(share.close)
            try:
                create, step = partial(share.create, num_bytes), f"allocate {num_bytes:,} bytes"
                tickets = together(step, create)
                # Each zeroed its own before it came here, and none returns before all have mapped.
                step = "map the memory of the other ranks"
                bases = together(step, partial(share.open, tickets))[self.rank]
                share.stop_handing()
            except RankError:
                # CUDA IPC: nobody frees what another still has open.
                together("let go of the memory of the other ranks", share.close_others)
                raise
            undo.pop_all()
        return bases, share.close

    def _describe(self, device: int | None, handles: str | None) -> dict[str, object]:
        """What the others must know of this rank."""
        if handles not in (None, "vmm", "ipc"):
            raise ValueError(f'handles must be "vmm", "ipc" or None, got {handles!r}')
        self.device = device_number(device)
        self._device = SharingDevice(self.device)
        return {
            "host": _host(),
            "user": os.geteuid(),
            "handles": handles,
            "nodes": self.num_nodes,
            "gpu": self._device.uuid,
            "has_vmm": self._device.has_vmm,
        }


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = "unknown boot"
    return f"{socket.gethostname()} ({boot})"
