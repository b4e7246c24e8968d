"""Constants of the fused layer's kernel that follow from its plan's fields."""

from __future__ import annotations

from jitmoe.plan import variant
from jitmoe.plan.formats import format_of
from jitmoe.plan.memory_map import align, ceil_div
from jitmoe.plan.problem import MX_GROUP, QUANT_GROUP


def constants(plan) -> dict[str, int]:
    """Of a MegaMoePlan, by name: `num_stages` here is kNumStages there."""
    mx_row_words = plan.block_rows * (plan.is_mx and plan.quantizes)
    return {
        "block_tokens": plan.block_tokens,
        "tile_tokens": plan.tile_tokens,
        "block_rows": plan.block_rows,
        "block_k_bytes": plan.block_k_bytes,
        "element_bytes": format_of(plan.format).element_bytes,
        "quantizes": int(plan.quantizes),
        "has_block_scales": int(format_of(plan.format).scales == "block"),
        "promotes": int(plan.promotes),
        "channel_scales": int(format_of(plan.format).has_channel_scales or mx_row_words > 0),
        "has_chunk_scales": int(plan.has_chunk_scales),
        "expands": int(plan.expands),
        "mx_row_words": mx_row_words,
        "mx_words": plan.mx_bytes // 4,
        "mx_tile_words_1": mx_row_words + _mx_scale_words(plan, plan.hidden),
        "mx_tile_words_2": mx_row_words + _mx_scale_words(plan, plan.intermediate),
        "max_blocks": plan.max_blocks,
        "split_tokens": int(plan.split_tokens),
        "num_gather_warps": 0 if plan.split_tokens else plan.num_gather_warps,
        "num_expand_warps": plan.num_expand_warps if plan.expands else 0,
        "num_math_warps": plan.num_math_warps,
        "num_k_blocks_1": plan.num_k_blocks_1,
        "num_k_blocks_2": plan.num_k_blocks_2,
        "token_groups": plan.token_groups,
        "num_groups_1": ceil_div(plan.hidden, QUANT_GROUP),
        "num_groups_2": ceil_div(plan.intermediate, QUANT_GROUP),
        "ordered_bytes": plan.ordered_bytes,
        "num_tiles_1": plan.num_tiles_1,
        "num_tiles_2": plan.num_tiles_2,
        "mid_stride": align(plan.intermediate, QUANT_GROUP),
        "row_align": plan.row_align,
        "x_quant_scale_stride": align(ceil_div(plan.hidden, QUANT_GROUP), 8),
        "weight_k_bytes": plan.weight_k_bytes,
        "num_load_stages": plan.num_load_stages,
        "landing_blocks": plan.landing_blocks,
        "landing_bytes": plan.landing_bytes,
        "weight_tile_bytes": plan.weight_tile_bytes,
        "weight_stage_bytes": plan.landing_bytes + plan.mx_bytes,
        "token_k_bytes": plan.token_k_bytes,
        "token_tile_bytes": plan.tile_tokens * plan.token_k_bytes,
        **variant.row_constants(plan),
        **variant.function_constants(plan.activation),
    } | ({"trace_capacity": plan.trace_capacity} if plan.trace else {})


def _mx_scale_words(plan, cols: int) -> int:
    """Of a tile's scales of 32 along all of its rows: jitmoe/mxfp4.py, PACKED_GROUPS."""
    bits, groups = (4, 8) if plan.quantizes else (8, 4)
    return plan.is_mx * plan.block_rows * align(ceil_div(cols, MX_GROUP), groups) * bits // 32
