"""What the fused layer's kernel needs of a workspace within a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitmoe.plan.memory_map import MemoryMap, Region

if TYPE_CHECKING:
    from jitmoe.plan.mega_moe import MegaMoePlan


def scratch(plan: MegaMoePlan, num_tokens: int) -> MemoryMap:
    """Regions that hold nothing between launches of up to `num_tokens` tokens."""
    tokens, c = max(num_tokens, 1), plan.derived_constants
    pairs, rows = tokens * plan.top_k, plan.row_capacity(num_tokens)
    if plan.split_tokens:
        x = (
            Region("pool", "u8", (rows, plan.hidden), 256),
            Region("pool_scale", "f32", (plan.num_k_blocks_1, rows), 256),
        )
    else:
        x = (
            Region("pool", "u8", (tokens, plan.hidden), 256),
            Region("pool_scale", "f32", (tokens, c["x_quant_scale_stride"]), 256),
        )
    return MemoryMap(
        (
            *x,
            Region("row_pairs", "u32", (rows,), 256),
            Region("mid", "u8", (rows, c["mid_stride"]), 256),
            Region("mid_scale", "f32", (plan.num_k_blocks_2, rows), 256),
            Region("slices", "u16", (pairs, plan.hidden), 256),
            Region("parts", "f32", _parts_shape(plan), 256),
            *([plan.trace_rings(plan.max_blocks)] if plan.trace else []),
        )
    )


def _parts_shape(plan: MegaMoePlan) -> tuple[int, ...]:
    """Decode: sums of tiles in parts, by GEMM, part, and as math's threads hold them.

    At most half as many tiles as blocks are in parts, and then no more parts than blocks.
    """
    blocks = 0 if plan.split_tokens else plan.max_blocks
    return 2, blocks, plan.block_rows * plan.block_tokens
