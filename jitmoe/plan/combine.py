"""CombinePlan: what came of dispatched tokens, back to their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan.gpu import HOPPER_SMEM_BYTES
from jitmoe.plan.memory_map import MemoryMap, Region, align
from jitmoe.plan.plan import Param, PlanError, Role
from jitmoe.plan.transfer import TransferPlan

_NUM_REDUCE_WARPS = 8
_PIECE_BYTES = 2048  # of a row that is summed, 64 a lane
_LEAST_SLOTS = 4


@dataclass(frozen=True)
class CombinePlan(TransferPlan):
    """Scale-up warps bring a token's rows, or the sum of a rank's rows of it, to the token's rank.
    Its reduce warps add them up as they come: in fixed order, f32, bf16 out.
    """

    name = "combine"

    @property
    def _row_buffer(self) -> int:
        return align(2 * self.hidden, 128)

    @property
    def _free_bytes(self) -> int:
        """Of shared memory, for rows."""
        return HOPPER_SMEM_BYTES - 2048

    @property
    def num_scale_up_warps(self) -> int:
        """As many as have a row in shared memory, beside what is summed; they need none themselves
        where they sum.
        """
        if self.expert_rows:
            return 8
        room = self._free_bytes - _NUM_REDUCE_WARPS * _LEAST_SLOTS * _PIECE_BYTES
        return min(8, room // self._row_buffer // 4 * 4)

    @property
    def num_reduce_warps(self) -> int:
        return _NUM_REDUCE_WARPS

    @property
    def num_sum_warps(self) -> int:
        return self.num_reduce_warps + self.num_scale_up_warps * self.expert_rows

    @property
    def num_slots(self) -> int:
        """Pieces of rows on their way to a warp that sums."""
        rows = 0 if self.expert_rows else self.num_scale_up_warps * self._row_buffer
        return min(8, (self._free_bytes - rows) // (self.num_sum_warps * _PIECE_BYTES))

    @property
    def _regs(self) -> tuple[int, int]:
        """Warps that only copy leave their registers to those that sum: 40 + 216 of two
        warpgroups' 256 (DeepEP V2 has the same split).
        """
        return (128, 128) if self.expert_rows else (40, 216)

    @property
    def roles(self) -> tuple[Role, ...]:
        regs, up = self._regs, "sum rows here" if self.expert_rows else "TMA: rows"
        return (
            Role("scale_up", self.num_scale_up_warps, regs[0], f"{up}, to the tokens' ranks"),
            Role("reduce", self.num_reduce_warps, regs[1], "sum what comes home"),
        )

    @property
    def derived_constants(self) -> dict[str, int]:
        return super().derived_constants | {
            "num_scale_up_warps": self.num_scale_up_warps,
            "num_reduce_warps": self.num_reduce_warps,
            "num_sum_warps": self.num_sum_warps,
            "num_slots": self.num_slots,
            "piece_bytes": _PIECE_BYTES,
        }

    @cached_property
    def smem(self) -> MemoryMap:
        warps, sums, slots = self.num_scale_up_warps, self.num_sum_warps, self.num_slots
        rows = (
            Region("rows", "u8", (warps, self._row_buffer), 128, "scale-up's own"),
            Region("row_landed", "u64", (warps,), 8, "scale-up's own"),
        )
        return MemoryMap(
            (
                *(() if self.expert_rows else rows),
                Region("pieces", "u8", (sums, slots, _PIECE_BYTES), 128, "of rows that are summed"),
                Region("piece_landed", "u64", (sums, slots), 8, "a summing warp's own"),
                Region("first", "u32", (5,), 16, "launch parity, number, abort"),
            )
        )

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("rows_out", "const u8*", "[rows, hidden] bf16, in dispatch's order"),
            Param("places", "const uint2*", "[num_tokens, top_k], as dispatch left them"),
            Param("own_records", "const u32*", "as dispatch left them"),
            Param("source_starts", "const u32*", "as dispatch left them"),
            Param("bias_0", "const u8*", "[num_tokens, hidden] bf16, or null"),
            Param("bias_1", "const u8*", "the same"),
            Param("y", "u8*", "[num_tokens, hidden] bf16"),
            Param("header", "u32*", "control"),
            Param("banks", "u32*", "control"),
            Param("status", "u32*", "host memory, read by the host after a timeout"),
            Param("rows_stride", "i64", "bytes from row to row"),
            Param("bias_0_stride", "i64", "bytes from token to token"),
            Param("bias_1_stride", "i64", "bytes"),
            Param("y_stride", "i64", "bytes"),
            *self.rank_params,
            Param("num_tokens", "u32", "of this rank"),
            Param("is_weighted", "u32", "rows of experts are multiplied by router weights"),
        )

    def check_fields(self) -> None:
        super().check_fields()
        if self.num_scale_up_warps < 4:
            raise PlanError(
                f"rows of {2 * self.hidden:,} bytes leave no room for 4 of them in shared memory; "
                "split hidden over two calls"
            )
