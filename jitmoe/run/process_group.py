"""ProcessGroup: how groups of a process for each rank meet, agree and allocate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from jitmoe.run.meeting import Meeting
from jitmoe.run.symmetric import Group, SymmetricMemory, check_num_bytes, close_all


class ProcessGroup(Group):
    """One rank of a group of processes.

    rank  of this process, from 0 on
    """

    rank: int
    _by_hand: ClassVar[str]  # what takes a rank, num_ranks and all_gather

    def __init__(self, meeting: Meeting):
        self.rank, self.ranks, self.num_ranks = meeting.rank, (meeting.rank,), meeting.num_ranks
        self._meeting = meeting
        self._memories: list[SymmetricMemory] = []

    @classmethod
    @abstractmethod
    def _connect(
        cls,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[object], Sequence],
        device: int | None,
        **options,
    ) -> Self:
        """Collective: the group of ranks that meet through all_gather."""

    @abstractmethod
    def _share(self, num_bytes: int) -> tuple:
        """Collective: what SymmetricMemory takes after num_bytes: addresses of so many zeroed bytes
        of each rank, what gives them back, and the rail if there is one.
        """

    @classmethod
    def from_torch(cls, group=None, device: int | None = None, **options) -> Self:
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
        return cls._connect(rank, num_ranks, all_gather, device, **options)

    @classmethod
    def from_mpi(cls, comm=None, device: int | None = None, **options) -> Self:
        """Of the ranks of an mpi4py communicator (default: MPI.COMM_WORLD)."""
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        return cls.from_any(comm, device, **options)

    @classmethod
    def from_any(cls, obj, device: int | None = None, **options) -> Self:
        """Of any communicator with allgather(obj) of picklable objects, and rank and size or
        Get_rank() and Get_size(). One of nccl4py has none: its allgather takes arrays.

        Raises TypeError for an object without them.
        """
        rank, size = _number(obj, "rank", "Get_rank"), _number(obj, "size", "Get_size")
        if rank is None or size is None or not callable(getattr(obj, "allgather", None)):
            raise TypeError(
                f"a communicator must have allgather, and rank and size or Get_rank and Get_size; "
                f"{type(obj).__name__} has not: pass rank, num_ranks and all_gather to "
                f"{cls._by_hand}"
            )
        return cls._connect(rank, size, obj.allgather, device, **options)

    def allocate(self, num_bytes: int) -> SymmetricMemory:
        self.agree("allocate", num_bytes=num_bytes)
        check_num_bytes(num_bytes)
        self._memories.append(SymmetricMemory(num_bytes, *self._share(num_bytes)))
        return self._memories[-1]

    def agree(self, what: str, **facts) -> None:
        self._meeting.agree(what, facts)

    def barrier(self) -> None:
        self._meeting.gather("barrier", None)

    def close(self) -> None:
        close_all(self._memories)


def _number(obj, attribute: str, getter: str) -> int | None:
    if callable(getattr(obj, getter, None)):
        return getattr(obj, getter)()
    value = getattr(obj, attribute, None)
    return value() if callable(value) else value
