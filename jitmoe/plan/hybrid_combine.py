"""HybridCombinePlan: what came of dispatched tokens, back to their ranks on several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan.combine import CombinePlan
from jitmoe.plan.gpu import HOPPER_SMEM_BYTES
from jitmoe.plan.hybrid import MAX_BLOCK_CHANNELS, HybridPlan
from jitmoe.plan.memory_map import MemoryMap, Region, align
from jitmoe.plan.plan import Param, PlanError, Role

# Bytes of a row that are summed at a time, and how many such pieces a warp has on their way at
# least. 4 KiB instead of 2: 2,799 to 2,763 us by tokens, 3,191 to 3,031 by experts (2 virtual nodes
# of 4 ranks of 4,096 tokens, H200, two leases of 2026-12-01).
_PIECE_BYTES = 4096
_LEAST_SLOTS = 3


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
        """Of shared memory, for rows and pieces."""
        return HOPPER_SMEM_BYTES - 2048 - self.rail_bytes(2 * MAX_BLOCK_CHANNELS)

    @property
    def block_channels(self) -> int:
        """As many as have a row in shared memory, beside the pieces of what is summed; those that
        sum need none.
        """
        if self.expert_rows:
            return self.most_channels
        of_warp = self._row_buffer + _LEAST_SLOTS * _PIECE_BYTES
        return min(self.most_channels, self._free_bytes // of_warp // 2 * 2)

    @property
    def num_sum_warps(self) -> int:
        """The forward warps, and where they sum the scale-up warps too."""
        return self.block_channels * (1 + self.expert_rows)

    @property
    def num_slots(self) -> int:
        """Pieces of rows on their way to a warp that sums."""
        rows = 0 if self.expert_rows else self.block_channels * self._row_buffer
        return min(8, (self._free_bytes - rows) // (max(self.num_sum_warps, 1) * _PIECE_BYTES))

    @property
    def roles(self) -> tuple[Role, ...]:
        # Warps that only copy leave their registers to those that sum: 40 + 216 of two warpgroups'
        # 256 (DeepEP V2 has the same split). Rows that stream through shared memory would do with
        # less; what an even split costs was not measured. NCCL's functions forbid the shift: ptxas
        # ignores setmaxnreg beside calls (C7506).
        channels = self.block_channels
        even = min(65536 // (64 * channels), 255) // 8 * 8
        splits = channels in (4, 8) and not self.expert_rows and self.rail != "gin"
        regs = (40, 216) if splits else (even, even)
        up = "sum rows here" if self.expert_rows else "TMA: rows"
        forward = "sum a node's rows, send them along the rail, then sum what came home"
        return (
            Role("scale_up", channels, regs[0], f"{up}, to the node's rank that forwarded"),
            Role("forward_sums", channels, regs[1], forward),
        )

    @property
    def derived_constants(self) -> dict[str, int]:
        return super().derived_constants | {
            "num_sum_warps": self.num_sum_warps,
            "num_slots": self.num_slots,
            "piece_bytes": _PIECE_BYTES,
        }

    @cached_property
    def smem(self) -> MemoryMap:
        channels, sums, slots = self.block_channels, self.num_sum_warps, self.num_slots
        rows = (
            Region("rows", "u8", (channels, self._row_buffer), 128, "scale-up's own"),
            Region("row_landed", "u64", (channels,), 8, "scale-up's own"),
        )
        return MemoryMap(
            (
                *(() if self.expert_rows else rows),
                Region("pieces", "u8", (sums, slots, _PIECE_BYTES), 128, "of rows that are summed"),
                Region("piece_landed", "u64", (sums, slots), 8, "a summing warp's own"),
                *super().smem.regions,
                *self.rail_regions(2 * channels),
            )
        )

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
