"""HybridCombinePlan: what came of dispatched tokens, back to their ranks on several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan.combine import CombinePlan
from jitmoe.plan.gpu import HOPPER_SMEM_BYTES
from jitmoe.plan.hybrid import MAX_BLOCK_CHANNELS, HybridPlan
from jitmoe.plan.memory_map import MemoryMap, Region, align
from jitmoe.plan.plan import Param, PlanError, Role


@dataclass(frozen=True)
class HybridCombinePlan(HybridPlan, CombinePlan):
    """Scale-up warps bring a token's rows, or a rank's sum of them, to the rank of their node that
    forwarded it; its forward warps add them up, send the sum along the rail, and add up what comes
    home: in fixed order, f32, bf16 out.
    """

    name = "hybrid_combine"

    @property
    def _row_buffer(self) -> int:
        return align(2 * self.hidden, 128)

    @property
    def _free_bytes(self) -> int:
        """Of shared memory, for rows."""
        return HOPPER_SMEM_BYTES - 512 - self.rail_bytes(2 * MAX_BLOCK_CHANNELS)

    @property
    def block_channels(self) -> int:
        """As many as have a row in shared memory; where rows are summed on their way none has, but
        all of them many registers.
        """
        if self.expert_rows:
            return 6
        return min(MAX_BLOCK_CHANNELS, self._free_bytes // self._row_buffer // 4 * 4)

    @property
    def num_row_buffers(self) -> int:
        warps = max(self.block_channels, 1)
        return min(2, self._free_bytes // (warps * self._row_buffer))

    @property
    def roles(self) -> tuple[Role, ...]:
        # Warps that only copy leave their registers to those that sum: 40 + 216 of two warpgroups'
        # 256 (DeepEP V2 has the same split).
        channels = self.block_channels
        regs = (168, 168) if self.expert_rows else (40, 216)
        up = "sum rows here" if self.expert_rows else "TMA: rows"
        forward = "sum a node's rows, send them along the rail, then sum what came home"
        return (
            Role("scale_up", channels, regs[0], f"{up}, to the node's rank that forwarded"),
            Role("forward_sums", channels, regs[1], forward),
        )

    @property
    def derived_constants(self) -> dict[str, int]:
        return super().derived_constants | {
            "num_row_buffers": self.num_row_buffers,
            "rows_ahead": 4 if self.expert_rows else 8,
        }

    @cached_property
    def smem(self) -> MemoryMap:
        warps, buffers = self.block_channels, self.num_row_buffers
        rows = (
            ()
            if self.expert_rows
            else (
                Region("buffers", "u8", (warps, buffers, self._row_buffer), 128, "scale-up's own"),
                Region("landed", "u64", (warps, buffers), 8, "scale-up's own"),
            )
        )
        return MemoryMap((*rows, *super().smem.regions, *self.rail_regions(2 * warps)))

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *super().params,
            Param("forwarded", "const u32*", "as dispatch left them"),
            Param("source_starts", "const u32*", "as dispatch left them"),
        )

    def check_fields(self) -> None:
        super().check_fields()
        if self.block_channels < 4:
            raise PlanError(
                f"rows of {2 * self.hidden:,} bytes leave no room for 4 of them in shared memory; "
                "split hidden over two calls"
            )
