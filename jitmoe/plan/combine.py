"""CombinePlan: what came of dispatched tokens, back to their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan.memory_map import MemoryMap, Region
from jitmoe.plan.plan import Param, Role
from jitmoe.plan.transfer import TransferPlan


@dataclass(frozen=True)
class CombinePlan(TransferPlan):
    """Every warp first sums the rows that its rank has of a token and stores the sum at the token's
    rank, then adds up what has come for the rank's own tokens: in fixed order, f32, bf16 out.
    """

    name = "combine"
    num_reduce_warps = 16

    @property
    def roles(self) -> tuple[Role, ...]:
        job = "sum rows here and send them home, then sum what came home"
        return (Role("reduce", self.num_reduce_warps, 128, job),)

    @property
    def derived_constants(self) -> dict[str, int]:
        return super().derived_constants | {"piece_bytes": 2048}

    @cached_property
    def smem(self) -> MemoryMap:
        return MemoryMap((Region("first", "u32", (5,), 16, "launch parity, number, abort"),))

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("rows_out", "const u8*", "[rows, hidden] bf16, in dispatch's order"),
            Param("places", "const uint2*", "[num_tokens, top_k], as dispatch left them"),
            Param("own_records", "const u32*", "as dispatch left them"),
            Param("num_received", "const u32*", "tokens, rows"),
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
