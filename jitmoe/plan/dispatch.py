"""DispatchPlan: tokens to the ranks that hold their experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan.gpu import HOPPER_SMEM_BYTES
from jitmoe.plan.memory_map import MemoryMap, Region, align
from jitmoe.plan.plan import Param, PlanError, Role
from jitmoe.plan.transfer import TransferPlan


@dataclass(frozen=True)
class DispatchPlan(TransferPlan):
    """Notify warps count, exchange counts and find every row's place; dispatch warps carry a row
    each from x to all its places, through shared memory.
    """

    name = "dispatch"
    num_notify_warps = 4
    # That send: 12 with 2 rows of 7 KiB each keep 3.3 TB/s in flight (H200, 2026-11-30).
    max_row_warps = 12

    @property
    def _row_buffer(self) -> int:
        return align(self.row_bytes, 128)

    @property
    def _free_bytes(self) -> int:
        """Of shared memory, beside counts."""
        counts, scales = 24 * self.num_columns, 4 * self.max_row_warps * self.num_groups
        return HOPPER_SMEM_BYTES - counts - scales - 1024

    @property
    def num_dispatch_warps(self) -> int:
        return max(0, min(self.max_row_warps, self._free_bytes // self._row_buffer) // 4 * 4)

    @property
    def num_row_buffers(self) -> int:
        """Rows of a warp: two if they fit, one loads while the other's stores read."""
        warps = max(self.num_dispatch_warps, 1)
        return min(2, self._free_bytes // (warps * self._row_buffer))

    @property
    def roles(self) -> tuple[Role, ...]:
        regs = 65536 // (32 * (self.num_notify_warps + self.num_dispatch_warps)) // 8 * 8
        regs = min(regs, 128)
        send = "TMA: rows from x, to every rank and expert that wants them"
        return (
            Role("notify", self.num_notify_warps, regs, "count, tell ranks, find rows' places"),
            Role("dispatch", self.num_dispatch_warps, regs, send),
        )

    @property
    def derived_constants(self) -> dict[str, int]:
        return super().derived_constants | {
            "num_notify_warps": self.num_notify_warps,
            "num_dispatch_warps": self.num_dispatch_warps,
            "num_row_buffers": self.num_row_buffers,
            "num_columns": self.num_columns,
        }

    @cached_property
    def smem(self) -> MemoryMap:
        warps, buffers = self.num_dispatch_warps, self.num_row_buffers
        columns = self.num_columns
        return MemoryMap(
            (
                Region("buffers", "u8", (warps, buffers, self._row_buffer), 128, "dispatch's own"),
                Region("landed", "u64", (warps, buffers), 8, "dispatch's own"),
                Region("scales", "f32", (warps, max(self.num_groups, 1)), 16, "dispatch's own"),
                Region("places_found", "u64", (1,), 8, "notify -> dispatch"),
                Region("counts", "u32", (self.num_notify_warps, columns), 16, "notify's own"),
                Region("before", "u32", (columns,), 16, "notify's own"),
                Region("totals", "u32", (columns,), 16, "notify's own"),
                Region("first", "u32", (5,), 16, "launch parity, number, abort"),
            )
        )

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "const u8*", "[num_tokens, hidden] bf16 or e4m3"),
            Param("x_scale", "const float*", "[num_tokens, hidden/128] by its strides, e4m3 only"),
            Param("topk_ids", "const u8*", "[num_tokens, top_k] i32 or i64"),
            Param("topk_weights", "const u8*", "[num_tokens, top_k] f32 or bf16"),
            Param("places", "uint2*", "[num_tokens, top_k]: rank and token there, row there"),
            Param("own_records", "u32*", "copy of what came: [token][record]"),
            Param("expert_counts", "u32*", "[num_experts]: rows of each"),
            Param("expert_starts", "u32*", "[num_experts + 1]: first row of each, and the end"),
            Param("num_received", "u32*", "tokens, rows"),
            Param("host_received", "u32*", "host memory: tokens + 1, rows; or null"),
            Param("block_counts", "u32*", "scratch"),
            Param("header", "u32*", "control"),
            Param("banks", "u32*", "control"),
            Param("status", "u32*", "host memory, read by the host after a timeout"),
            Param("x_stride", "i64", "bytes from token to token"),
            Param("x_scale_token_stride", "i64", "elements"),
            Param("x_scale_group_stride", "i64", "elements"),
            *self.rank_params,
            Param("num_tokens", "u32", "of this rank"),
            Param("x_is_bf16", "u32"),
            Param("ids_are_i64", "u32"),
            Param("weights_are_bf16", "u32"),
            Param("first_expert", "u32", "id of expert 0 of rank 0"),
            Param("is_cached", "u32", "places are those of an earlier launch"),
        )

    def check_fields(self) -> None:
        super().check_fields()
        if self._free_bytes < HOPPER_SMEM_BYTES // 2:
            raise PlanError(
                f"{self.num_ranks} ranks with {self.num_experts} experts each are too many for "
                "shared memory, which holds counts of all; take fewer ranks in a group"
            )
        if self.num_dispatch_warps < 4:
            raise PlanError(
                f"rows of {self.row_bytes:,} bytes leave no room for 4 of them in shared memory; "
                "take fp8, or split hidden over two calls"
            )
