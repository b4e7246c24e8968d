"""GroupWorkspace: what a group's calls need between launches: a workspace for every rank that this
process drives, and symmetric memory.
"""

from __future__ import annotations

from dataclasses import astuple
from itertools import product

from jitmoe.plan.memory_map import MemoryMap
from jitmoe.plan.plan import Plan
from jitmoe.run.driver import is_capturing
from jitmoe.run.host_counts import HostCounts
from jitmoe.run.symmetric import Group, SymmetricMemory, check_group
from jitmoe.run.workspace import CaptureError, Workspace


class GroupWorkspace:
    """Device memory of a group for calls on one stream at a time; grows on demand, on all ranks at
    once, outside graph capture.

    timeout_s   budget of every wait inside a kernel, in seconds (default JITMOE_TIMEOUT_S)
    workspaces  one for each rank that this process drives
    """

    def __init__(self, group: Group, timeout_s: float | None = None):
        check_group(group)
        self.group = group
        self.workspaces = [Workspace(group.device, timeout_s=timeout_s) for _ in group.ranks]
        self._shared: dict[MemoryMap, tuple[SymmetricMemory, object]] = {}
        self._retired: list[tuple[MemoryMap, tuple[SymmetricMemory, object]]] = []
        self._plans: set[tuple[Plan, int]] = set()
        self._capacity = 0
        self.ready: dict = {}  # launches that callers made ready (fused_ranks.py)
        self.host_counts = [HostCounts() for _ in group.ranks]

    @property
    def generation(self) -> int:
        """Changes when memory moves."""
        return sum(workspace.generation for workspace in self.workspaces)

    def reserve(self, plan: Plan, rank_tokens: int, stream: int) -> tuple[int, dict[str, int], int]:
        """For calls of up to `rank_tokens` tokens a rank: the address of the table of all ranks'
        symmetric memory, the offsets of its regions by name, and the tokens there is room for.

        Collective where memory grows. Raises CaptureError there during a graph capture.
        """
        if rank_tokens > self._capacity:
            _refuse_capture(stream, f"memory for {rank_tokens} tokens a rank")
            self._retire()
            self._capacity = -(-rank_tokens // 64) * 64
        regions = plan.symmetric(self._capacity)
        if regions not in self._shared:
            _refuse_capture(stream, "symmetric memory of the group")
            self._shared[regions] = self._allocate(regions)
        return self._shared[regions][1].data.ptr, regions.offsets, self._capacity

    def address(self, plan: Plan, rank: int, name: str) -> int:
        """Of a region of a rank's symmetric memory, which must be reserved."""
        regions = plan.symmetric(self._capacity)
        return self._shared[regions][0].bases[rank] + regions.offsets[name]

    def rail(self, plan: Plan, rank: int) -> tuple[int, int, int, int]:
        """Of a rank's symmetric memory, which must be reserved: the address of the table of its
        rail peers' by node, and NCCL's communicator, window and offset there, or zeros.
        """
        memory, table = self._shared[plan.symmetric(self._capacity)]
        group = self.group
        first = group.num_ranks + rank % group.ranks_per_node * group.num_nodes
        nccl = (0, 0, 0) if memory.rail is None else astuple(memory.rail)
        return table.data.ptr + 8 * first, *nccl

    def _allocate(self, regions: MemoryMap) -> tuple[SymmetricMemory, object]:
        import cupy
        import numpy as np

        memory = self.group.allocate(regions.num_bytes)
        num_nodes, place = self.group.num_nodes, self.group.ranks_per_node
        rails = [base for u in range(place) for base in memory.bases[u::place]] * (num_nodes > 1)
        with cupy.cuda.Device(self.group.device) as device:
            table = cupy.asarray(np.array([*memory.bases, *rails], np.uint64))
            device.synchronize()
        return memory, table

    def _retire(self) -> None:
        self.ready.clear()
        if any(workspace.is_captured for workspace in self.workspaces):
            self._retired += self._shared.items()  # a captured graph still points to it
            self._shared.clear()
        else:
            self.close()

    def close(self) -> None:
        """Collective: give symmetric memory back, when no rank's launches use it any more; captured
        graphs must not be launched after it. A later call takes new.
        """
        import cupy

        cupy.cuda.Device(self.group.device).synchronize()
        self.group.barrier()
        self.ready.clear()
        for _, (memory, _) in (*self._shared.items(), *self._retired):
            memory.close()
        self._shared.clear()
        self._retired.clear()

    def enter(self, plan: Plan, rank_tokens: int, digest: str) -> None:
        """Collective before the first launch of a plan, whose kernel is loaded: no rank may wait
        for one that still compiles. Raises RankMismatch where ranks plan otherwise.
        """
        if (plan, self._capacity) in self._plans:
            return
        self.group.agree("run a layer", plan=digest, max_num_tokens=rank_tokens)
        self.group.barrier()
        self._plans.add((plan, self._capacity))

    def check(self) -> None:
        """Raise DeviceTimeout if a launch of a rank here ran out of a wait's budget."""
        for workspace in self.workspaces:
            workspace.check()

    def reset(self) -> None:
        """Collective: re-arm all ranks after a DeviceTimeout."""
        import cupy

        self.group.barrier()
        for workspace in self.workspaces:
            workspace.reset()
        with cupy.cuda.Device(self.group.device) as device:
            for regions, (memory, _) in (*self._shared.items(), *self._retired):
                for rank, (offset, num_bytes) in product(self.group.ranks, regions.zeroed):
                    _zero(memory.bases[rank] + offset, num_bytes)
            device.synchronize()
        self.group.barrier()


def _refuse_capture(stream: int, what: str) -> None:
    if is_capturing(stream):
        raise CaptureError(
            f"{what} must be allocated, which a graph capture forbids; call the layer once with "
            "the same max_num_tokens before capturing"
        )


def _zero(address: int, num_bytes: int) -> None:
    import cupy

    memory = cupy.cuda.UnownedMemory(address, num_bytes, None)
    cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)).fill(0)
