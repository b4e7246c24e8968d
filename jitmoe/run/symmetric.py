"""Groups of ranks and their symmetric memory: one allocation of equal size on each rank, which all
ranks can address.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jitmoe.run.driver import DriverError, num_devices
from jitmoe.run.ranks import check_nodes, check_num_ranks


@dataclass(frozen=True)
class Rail:
    """What a kernel needs to write to ranks of other nodes by NCCL's GIN.

    comm    device address of NCCL's device communicator, see run/nccl_rail.py
    window  NCCL's ncclWindow_t, a device address, of all ranks' memory
    offset  bytes from the window's start to the memory
    """

    comm: int
    window: int
    offset: int


class SymmetricMemory:
    """One allocation of each rank; get it from `Group.allocate`, zeroed.

    num_bytes  bytes of each rank's allocation
    bases      addresses of all ranks' allocations as mapped in this process, by rank, at multiples
               of 256, 0 for ranks of other nodes; () once closed
    rail       the way to other nodes; None where there is one node, and once closed
    """

    def __init__(
        self,
        num_bytes: int,
        bases: Sequence[int],
        release: Callable[[], None],
        rail: Rail | None = None,
    ):
        self.num_bytes = num_bytes
        self.bases: tuple[int, ...] = tuple(bases)
        self.rail = rail
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        """Wait for the device and give this process's part back; a second time does nothing.

        Not collective, so that it works after another rank died: have a `Group.barrier` before,
        once no kernel of any rank uses the memory any more.
        """
        release, self._release, self.bases, self.rail = self._release, None, (), None
        if release is not None:
            release()


class Group(ABC):
    """Ranks that share symmetric memory. Collective methods are called by all ranks, in the same
    order and by one thread of each at a time.

    num_ranks  ranks of the group
    ranks      those which this process drives
    device     CUDA device number of this process's ranks
    num_nodes  nodes, of as many ranks each, one after the other; ranks reach the memory of those of
               their node
    rail       how ranks of several nodes send to each other, each to those with its place in their
               nodes: "memory", "delayed" or "gin" (plan/hybrid.py)
    """

    num_nodes: int = 1
    rail: str = "memory"
    num_ranks: int
    ranks: tuple[int, ...]
    device: int
    workspace: object | None = None  # of calls that name none

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @abstractmethod
    def allocate(self, num_bytes: int) -> SymmetricMemory:
        """Collective: `num_bytes` zeroed bytes on every rank, which must ask for the same number.
        Not while a graph is captured.

        Raises ValueError for a number below 1, RankMismatch, and where memory is short MemoryError
        or RankError: on all ranks then.
        """

    @abstractmethod
    def agree(self, what: str, **facts) -> None:
        """Collective: raise RankMismatch on all ranks, naming those that differ, unless every rank
        gives the same facts. `what` says in the text what they are about; facts are picklable and
        comparable.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Collective, on the host: returns when all ranks have come. Waits for no stream."""

    @abstractmethod
    def close(self) -> None:
        """Close all memory that was allocated. Not collective, see `SymmetricMemory.close`."""

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def check_num_bytes(num_bytes: int) -> None:
    """Raise ValueError unless so much can be allocated."""
    if not isinstance(num_bytes, int) or num_bytes < 1:
        raise ValueError(f"num_bytes must be an int of at least 1, got {num_bytes!r}")


def check_group(group: object) -> None:
    """Raises TypeError for what is no group."""
    if not isinstance(group, Group):
        raise TypeError(
            "group must be a LocalGroup, PeerGroup or NcclGroup, got "
            f"{type(group).__name__}; make one, such as jitmoe.PeerGroup.from_torch()"
        )


def device_number(device: int | None) -> int:
    """`device`, or CuPy's current device for None. Raises DriverError where there is no GPU."""
    if device is None:
        import cupy

        if num_devices() == 0:
            raise DriverError(
                "a group needs a GPU and finds none; see `jitmoe doctor`, or try ranks on this "
                "CPU by `jitmoe emulate --ranks 2`"
            )
        device = cupy.cuda.Device().id
    return device


class LocalGroup(Group):
    """`num_ranks` (1 to 64) virtual ranks on one GPU, all driven by this process; or `nodes`
    virtual nodes (1 to 32) of `ranks_per_node` (1 to 32) each.

    device  CUDA device number (default: CuPy's current device)
    rail    how nodes send to each other: "memory", or "delayed", which is late and out of order, to
            test with

    Raises ValueError for numbers out of these ranges, or that do not fit together.
    """

    def __init__(
        self,
        num_ranks: int | None = None,
        device: int | None = None,
        *,
        nodes: int = 1,
        ranks_per_node: int | None = None,
        rail: str = "memory",
    ):
        check_nodes(num_ranks, nodes, ranks_per_node)
        num_ranks = nodes * ranks_per_node if num_ranks is None else num_ranks
        check_num_ranks(num_ranks)
        if rail not in ("memory", "delayed"):
            raise ValueError(f'rail must be "memory" or "delayed", got {rail!r}')
        self.num_nodes, self.rail = nodes, rail
        self.num_ranks, self.ranks = num_ranks, tuple(range(num_ranks))
        self.device = device_number(device)
        self._memories: list[SymmetricMemory] = []

    def allocate(self, num_bytes: int) -> SymmetricMemory:
        import cupy

        check_num_bytes(num_bytes)
        arrays = []
        with cupy.cuda.Device(self.device) as device:
            try:
                for _ in self.ranks:
                    arrays.append(cupy.zeros(num_bytes, dtype=cupy.uint8))
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise MemoryError(
                    f"{self.num_ranks} ranks of {num_bytes:,} bytes do not fit on GPU "
                    f"{self.device}: {error}; take fewer ranks or a smaller max_num_tokens"
                ) from error
            device.synchronize()

        def release() -> None:
            with cupy.cuda.Device(self.device) as device:
                device.synchronize()
            arrays.clear()

        bases = [array.data.ptr for array in arrays]
        self._memories.append(SymmetricMemory(num_bytes, bases, release))
        return self._memories[-1]

    def agree(self, what: str, **facts) -> None:
        """One process agrees with itself."""

    def barrier(self) -> None:
        """One process waits for nobody."""

    def close(self) -> None:
        close_all(self._memories)


def close_all(memories: list[SymmetricMemory]) -> None:
    """Close the last first, all of them even if one fails, whose error is raised then."""
    try:
        while memories:
            memories.pop().close()
    finally:
        if memories:
            close_all(memories)
