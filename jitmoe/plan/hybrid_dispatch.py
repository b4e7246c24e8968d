"""HybridDispatchPlan: tokens to the ranks that hold their experts, on several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.hybrid import MAX_BLOCK_CHANNELS, HybridPlan
from jitmoe.plan.memory_map import MemoryMap
from jitmoe.plan.plan import Param, Role


@dataclass(frozen=True)
class HybridDispatchPlan(HybridPlan, DispatchPlan):
    """Notify warps find every row's place. A token goes once to each node that it has experts on:
    scale-out warps send it along the rail, forward warps take it from there to the node's ranks.
    """

    name = "hybrid_dispatch"
    num_row_buffers = 1  # of a warp
    max_row_warps = 2 * MAX_BLOCK_CHANNELS

    @property
    def _free_bytes(self) -> int:
        return super()._free_bytes - self.rail_bytes(4 + self.max_row_warps)

    @property
    def block_channels(self) -> int:
        """As many as there are rows of two warps each in shared memory, and an even number; the
        delayed rail takes more registers.
        """
        fitting = self._free_bytes // (2 * self._row_buffer)
        most = MAX_BLOCK_CHANNELS - 2 if self.rail == "delayed" else self.most_channels
        return max(0, min(most, fitting) // 2 * 2)

    @property
    def num_dispatch_warps(self) -> int:
        """That have a row in shared memory."""
        return 2 * self.block_channels

    @property
    def roles(self) -> tuple[Role, ...]:
        channels = self.block_channels
        # What the launch gives: NCCL's functions forbid setmaxnreg (C7506 of ptxas).
        regs = min(65536 // (32 * (self.num_notify_warps + 2 * channels)), 255) // 8 * 8
        send = "TMA: messages from x; along the rail to every node that wants them"
        forward = "TMA: rows from messages that came, to every rank and expert here"
        return (
            Role("notify", self.num_notify_warps, regs, "count, tell ranks, find rows' places"),
            Role("scale_out", channels, regs, send),
            Role("forward", channels, regs, forward),
        )

    @property
    def derived_constants(self) -> dict[str, int]:
        return super().derived_constants | {"dispatch_warp_begin": self.num_notify_warps}

    @cached_property
    def smem(self) -> MemoryMap:
        return MemoryMap((*super().smem.regions, *self.rail_regions(self.num_threads // 32)))

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *super().params,
            Param("forwarded", "u32*", "[num_nodes, tokens, 2]: what went on, by channel"),
            Param("source_starts", "u32*", "[num_ranks + 1]: first token of each rank here"),
        )
