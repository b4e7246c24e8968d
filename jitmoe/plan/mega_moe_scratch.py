"""What the fused layer's kernel keeps in device memory, within a launch and between launches."""

from __future__ import annotations

from jitmoe.plan.formats import format_of
from jitmoe.plan.memory_map import MemoryMap, Region


def scratch(plan, num_tokens: int) -> MemoryMap:
    """Regions of a MegaMoePlan that hold nothing between launches; empty ones are not used."""
    tokens, c = max(num_tokens, 1), plan.derived_constants
    pairs, rows = tokens * plan.top_k, plan.row_capacity(num_tokens)
    width = format_of(plan.format).element_bytes
    scale_rows = rows if plan.quantizes else 0
    sums_here = plan.num_ranks == 1 or plan.presum
    if plan.split_tokens:
        x = (
            Region("pool", "u8", (rows, width * plan.hidden), 256),
            Region("pool_scale", "f32", (c["num_groups_1"], scale_rows), 256),
        )
    else:
        # Else rows are read where they lie.
        copies = plan.quantizes or plan.has_chunk_scales or plan.num_ranks > 1
        copies = tokens if copies else 0
        x = (
            Region("pool", "u8", (copies, width * plan.hidden), 256),
            Region("pool_scale", "f32", (copies * plan.quantizes, c["x_quant_scale_stride"]), 256),
        )
    return MemoryMap(
        (
            *x,
            Region("row_pairs", "u32", (rows, 2 if plan.split_tokens else 1), 256),
            Region("mid", "u8", (rows, width * c["mid_stride"]), 256),
            Region("mid_scale", "f32", (c["num_groups_2"], scale_rows), 256),
            Region("slices", "u16", (pairs if sums_here else 0, plan.hidden), 256),
            Region("parts", "f32", parts_shape(plan), 256),
            *([plan.trace_rings(plan.max_blocks)] if plan.trace else []),
        )
    )


def control(plan, num_tokens: int) -> MemoryMap:
    """Regions of a MegaMoePlan that are zero before the first launch."""
    words, tokens = plan.bank_words(num_tokens), max(num_tokens, 1)
    return MemoryMap(
        (
            Region("header", "u32", (64,), 256, "launch parity, abort"),
            Region("banks", "u32", (2, words), 256, "counters, by launch parity"),
            Region("combine_count", "u32", (tokens, plan.num_tiles_2), 256, "self-resetting"),
        )
    )


def symmetric(plan, rank_tokens: int) -> MemoryMap:
    """Regions of a rank that other ranks write or read (templates/roles/many_ranks.cuh). Doubled
    ones have a bank for every other launch.
    """
    tokens, ranks = max(rank_tokens, 1), plan.num_ranks
    pairs, c = ranks * tokens * plan.top_k, plan.derived_constants
    row_bytes = format_of(plan.format).element_bytes * plan.hidden
    return MemoryMap(
        (
            Region("launches", "u32", (1,), 256, "number of the next launch", True),
            Region("pairs_ready", "u32", (ranks,), 256, "by rank: a launch's number + 1", True),
            Region("tokens_ready", "u32", (ranks,), 256, "the same", True),
            Region(
                *("expert_done", "u32", (ranks * plan.num_experts,), 256),
                *("the same, by expert", True),
            ),
            Region("bounds", "u32", (2, ranks), 256, "by rank: rows it takes its share to have"),
            Region("pair_experts", "u32", (2, pairs), 256, "of all ranks' tokens"),
            Region("pair_weights", "f32", (2, pairs), 256),
            Region("staged_x", "u8", (2, tokens, row_bytes), 256, "of the rank's tokens"),
            Region(
                "staged_scale",
                "f32",
                (2, tokens * plan.quantizes, c["x_quant_scale_stride"]),
                256,
            ),
            Region("slots", "u16", (tokens, plan.top_k, plan.hidden), 256, "rows that come back"),
        )
    )


def parts_shape(plan) -> tuple[int, ...]:
    """Decode: sums of tiles in parts, by GEMM, part, and as math's threads hold them.

    At most half as many tiles as blocks are in parts, and then no more parts than blocks.
    """
    blocks = 0 if plan.split_tokens else plan.max_blocks
    return 2, blocks, plan.block_rows * plan.block_tokens
