"""HybridCombinePlan: what came of dispatched tokens, back to their ranks on several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan.combine import CombinePlan
from jitmoe.plan.hybrid import MAX_BLOCK_CHANNELS, HybridPlan
from jitmoe.plan.memory_map import MemoryMap
from jitmoe.plan.plan import Param, Role


@dataclass(frozen=True)
class HybridCombinePlan(HybridPlan, CombinePlan):
    """Scale-up warps bring a token's rows, or a rank's sum of them, to the rank of their node that
    forwarded it; its forward warps add them up, send the sum along the rail, and add up what comes
    home: in fixed order, f32, bf16 out.
    """

    name = "hybrid_combine"

    @property
    def _free_bytes(self) -> int:
        return super()._free_bytes - self.rail_bytes(2 * MAX_BLOCK_CHANNELS)

    @property
    def block_channels(self) -> int:
        return self.num_scale_up_warps

    @property
    def roles(self) -> tuple[Role, ...]:
        up, regs = super().roles[0], self._regs[1]
        job = "sum a node's rows, send them along the rail, then sum what came home"
        return up, Role("forward_sums", self.block_channels, regs, job)

    @cached_property
    def smem(self) -> MemoryMap:
        queues = self.rail_regions(2 * self.block_channels)
        return MemoryMap((*super().smem.regions, *queues))

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *super().params,
            Param("forwarded", "const u32*", "as dispatch left them"),
        )
