"""PeerGroup: one process for each rank, all on one host, their memory mapped into each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path

from jitmoe.run.ranks import (
    RankError,
    RankMismatch,
    check_num_ranks,
    difference,
    differences,
    name_ranks,
)
from jitmoe.run.shared_allocation import SharedAllocation
from jitmoe.run.shared_memory import SharingDevice
from jitmoe.run.symmetric import Group, SymmetricMemory, check_num_bytes, close_all

# What ranks must have alike to form a group, and what to do where they have not.
_REMEDIES = {
    "jitmoe": "install the same version for all",
    "num_ranks": "pass the same to all",
    "host": "a PeerGroup is of one host, seen as one by all its processes",
    "user": "run all as one user",
    "handles": "pass the same to all",
}


class PeerGroup(Group):
    """One rank of a group of processes on one host; making it is collective.

    rank        this process's number, from 0 on
    num_ranks   processes of the group, 1 to 64; several may share a GPU
    all_gather  all_gather(obj) -> the objects of all ranks, by rank: any collective of the
                caller's, for picklable objects; a rank that dies is its to notice
    device      CUDA device number (default: CuPy's current device)
    handles     how memory is shared: "vmm" (file descriptors of cuMemCreate), "ipc" (CUDA IPC), or
                None for vmm where all ranks' GPUs have it
    timeout_s   seconds that handing file descriptors around may take

    Raises on all ranks RankMismatch, by name of the ranks, for different hosts, users or versions
    of jitmoe, a rank number that occurs twice, or GPUs that cannot access each other, and RankError
    for whatever fails on one of them.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[object], Sequence],
        device: int | None = None,
        handles: str | None = None,
        timeout_s: float = 30.0,
    ):
        self.rank, self.ranks, self.num_ranks = rank, (rank,), num_ranks
        self._all_gather, self._timeout_s = all_gather, timeout_s
        self._memories: list[SymmetricMemory] = []
        facts = self._together("join the group", partial(self._introduce, device, handles))
        refusal = _refusal(facts)
        if refusal:
            raise RankMismatch(refusal)
        gpus = [fact["gpu"] for fact in facts]
        unreachable = self._together(
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
        self.handles = handles or ("vmm" if all(fact["has_vmm"] for fact in facts) else "ipc")

    @classmethod
    def from_torch(cls, group=None, device: int | None = None, **options) -> PeerGroup:
        """Of the ranks of a torch.distributed process group (default: all), whose
        all_gather_object bootstraps. `device` defaults to torch's current device.

        Raises RuntimeError without an initialised process group, ValueError outside of `group`.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group() first"
            )
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("this process is no rank of the torch.distributed group it was given")

        def all_gather(obj):
            objects = [None] * num_ranks
            dist.all_gather_object(objects, obj, group=group)
            return objects

        if device is None and torch.cuda.is_available():
            device = torch.cuda.current_device()
        return cls(rank, num_ranks, all_gather, device, **options)

    @classmethod
    def from_mpi(cls, comm=None, device: int | None = None, **options) -> PeerGroup:
        """Of the ranks of an mpi4py communicator (default: MPI.COMM_WORLD)."""
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        return cls.from_any(comm, device, **options)

    @classmethod
    def from_any(cls, obj, device: int | None = None, **options) -> PeerGroup:
        """Of any communicator with allgather(obj) of picklable objects, and rank and size or
        Get_rank() and Get_size().

        Raises TypeError for an object without them.
        """
        rank, size = _number(obj, "rank", "Get_rank"), _number(obj, "size", "Get_size")
        if rank is None or size is None or not callable(getattr(obj, "allgather", None)):
            raise TypeError(
                f"a communicator must have allgather, and rank and size or Get_rank and Get_size; "
                f"{type(obj).__name__} has not: pass rank, num_ranks and all_gather to PeerGroup"
            )
        return cls(rank, size, obj.allgather, device, **options)

    def allocate(self, num_bytes: int) -> SymmetricMemory:
        self.agree("allocate", num_bytes=num_bytes)
        check_num_bytes(num_bytes)
        share = SharedAllocation(
            self._device, self.handles, self.rank, self.num_ranks, self._timeout_s
        )
        with ExitStack() as undo:
            undo.callback(share.close)
            try:
                create, step = partial(share.create, num_bytes), f"allocate {num_bytes:,} bytes"
                tickets = self._together(step, create)
                # Each zeroed its own before it came here, and none returns before all have mapped.
                step = "map the memory of the other ranks"
                bases = self._together(step, partial(share.open, tickets))[self.rank]
                share.stop_listening()
            except RankError:
                # CUDA IPC: nobody frees what another still has open.
                self._together("let go of the memory of the other ranks", share.close_others)
                raise
            undo.pop_all()
        self._memories.append(SymmetricMemory(num_bytes, bases, share.close))
        return self._memories[-1]

    def agree(self, what: str, **facts) -> None:
        found = differences(self._gather(f"agree on {what}", facts))
        if found:
            raise RankMismatch(
                f"ranks differ in {what}: {'; '.join(found)}; pass the same on all ranks"
            )

    def barrier(self) -> None:
        self._gather("barrier", None)

    def close(self) -> None:
        close_all(self._memories)

    def _gather(self, what: str, value) -> list:
        """Everybody's value, by rank. Raises RankMismatch where ranks are at different places."""
        answers = list(self._all_gather((what, value)))
        if len(answers) != self.num_ranks:
            raise RankMismatch(
                f"all_gather gave {len(answers)} objects to rank {self.rank} of {self.num_ranks}; "
                "it must give one of each rank, and num_ranks be the same on all"
            )
        if any(not isinstance(answer, tuple) or len(answer) != 2 for answer in answers):
            raise RankMismatch(
                f"all_gather gave rank {self.rank} objects that no PeerGroup sent; have all ranks "
                "make the same calls in the same order"
            )
        places = difference([what for what, _ in answers])
        if places:
            raise RankMismatch(
                f"the call is {places}; have all ranks make the same calls in the same order"
            )
        return [value for _, value in answers]

    def _together(self, what: str, function: Callable[[], object]) -> list:
        """Everybody's function(), by rank. Raises RankError on all ranks if one failed."""
        error = result = None
        try:
            result = function()
        except Exception as caught:  # of whatever kind: the others wait
            error = caught
        failure = None if error is None else f"{type(error).__name__}: {error}"
        answers = self._gather(what, (result, failure))
        failed = [f"rank {r}: {text}" for r, (_, text) in enumerate(answers) if text]
        if failed:
            raise RankError(f"could not {what}: {'; '.join(failed)}") from error
        return [result for result, _ in answers]

    def _introduce(self, device: int | None, handles: str | None) -> dict[str, object]:
        """What the others must know of this rank. Builtins alone: versions may differ."""
        check_num_ranks(self.num_ranks)
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.num_ranks:
            raise ValueError(
                f"rank must be an int from 0 to {self.num_ranks - 1}, got {self.rank!r}"
            )
        if handles not in (None, "vmm", "ipc"):
            raise ValueError(f'handles must be "vmm", "ipc" or None, got {handles!r}')
        if device is None:
            import cupy

            device = cupy.cuda.Device().id
        self.device = device
        self._device = SharingDevice(device)
        return {
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "jitmoe": _version(),
            "host": _host(),
            "user": os.geteuid(),
            "handles": handles,
            "gpu": self._device.uuid,
            "has_vmm": self._device.has_vmm,
        }


def _refusal(facts: Sequence[dict]) -> str | None:
    """Why these ranks can form no group; None if they can."""
    ranks = [fact["rank"] for fact in facts]
    for rank in sorted(set(ranks)):
        places = [place for place, other in enumerate(ranks) if other == rank]
        if len(places) > 1:
            return (
                f"rank {rank} occurs {len(places)} times among {len(ranks)} ranks "
                f"(at the places of {name_ranks(places)}); number them from 0 on"
            )
    if ranks != sorted(ranks):
        return f"all_gather must give the objects of all ranks by rank, gave those of ranks {ranks}"
    for name, remedy in _REMEDIES.items():
        found = difference([fact[name] for fact in facts])
        if found:
            return f"{name} is {found}; {remedy}"
    without = [fact["rank"] for fact in facts if not fact["has_vmm"]]
    if facts[0]["handles"] == "vmm" and without:
        return (
            f'the GPU of {name_ranks(without)} cannot share memory with handles="vmm"; '
            'take handles="ipc" or None'
        )
    return None


def _version() -> str:
    try:
        return metadata.version("jitmoe")
    except metadata.PackageNotFoundError:
        return "a checkout"


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = "unknown boot"
    return f"{socket.gethostname()} ({boot})"


def _number(obj, attribute: str, getter: str) -> int | None:
    if callable(getattr(obj, getter, None)):
        return getattr(obj, getter)()
    value = getattr(obj, attribute, None)
    return value() if callable(value) else value
