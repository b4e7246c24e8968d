"""Shared memory of a block of the fused layer's kernel."""

from __future__ import annotations

from jitmoe.plan.memory_map import MemoryMap, Region
from jitmoe.plan.plan import WARP_THREADS


def smem(plan) -> MemoryMap:
    """Regions of a MegaMoePlan, in the order they lie in; notes say who signals whom."""
    stages, slots, tokens = plan.num_stages, plan.num_task_slots, plan.tile_tokens
    experts, math = plan.num_experts, plan.num_math_warps
    feeder = "feed" if plan.split_tokens else "gather"
    others = f"load, {feeder}, deliver, {'expand, ' * plan.expands}math"
    to_roles, from_roles = f"schedule -> {others}", f"{others} -> schedule"
    token_tile, token_scales = tokens * plan.token_k_bytes, tokens * plan.token_groups
    landing = plan.num_load_stages
    weights_from = "expand" if plan.expands else "load"
    transpose = 2048 if plan.split_tokens else 1024  # 16 rows of 128 bytes; 32 of 2 x 16
    regions = [
        Region(
            "weight_tiles", "u8", (stages, plan.weight_tile_bytes), 1024, f"{weights_from} -> math"
        ),
        *(
            [Region("packed_tiles", "u8", (landing, plan.landing_bytes), 1024, "load -> expand")]
            if plan.expands
            else []
        ),
        Region("token_tiles", "u8", (stages, token_tile), 1024, f"{feeder} -> math"),
        Region("token_scales", "f32", (stages, token_scales), 128, f"{feeder} -> math"),
        # MXFP4: as jitmoe/mxfp4.py packs them. Else block scales that meet in a tile.
        Region("weight_scales", "u8", (landing, plan.mx_bytes), 16, "load -> expand or math")
        if plan.is_mx
        else Region("weight_scales", "f32", (stages, 4), 16, f"{feeder} -> math"),
        Region("transpose", "u8", (math, transpose), 128, "a math warp's own"),
        Region("amax", "f32", (math, 64), 128, "math <-> math"),
        Region("full", "u64", (stages,), 8, f"{weights_from}, {feeder} -> math"),
        Region("empty", "u64", (stages,), 8, f"math -> {weights_from}, {feeder}"),
        Region("preloaded", "u64", (stages,), 8, "head -> load"),
        Region("task_full", "u64", (slots,), 8, to_roles),
        Region("task_empty", "u64", (slots,), 8, from_roles),
        Region("task_wanted", "u64", (slots,), 8, "load -> schedule"),
        Region("stored", "u64", (slots,), 8, "math -> deliver"),
        Region("is_last_part", "u32", (slots,), 4, "math -> deliver"),
        Region("tasks", "u32", (slots, 8), 16, to_roles),
        Region("task_rows", "u32", (slots, tokens), 16, to_roles),
        Region("task_used", "u32", (slots, tokens), 16, "schedule -> deliver"),
        Region("first", "u32", (5 if plan.num_ranks > 1 else 3,), 16, "head -> load, schedule"),
        Region("row_start", "u32", (experts + 1,), 4, "head -> load, schedule"),
        Region("row_end", "u32", (experts,), 4, "head -> load, schedule"),
        Region("block_start", "u32", (experts + 1,), 4, "head -> load, schedule"),
    ]
    if plan.split_tokens:
        regions += [
            Region("list_full", "u64", (2,), 8, "deliver -> math"),
            Region("list_size", "u32", (2,), 4, "deliver -> math"),
            Region("list_tile", "u32", (2,), 4, "deliver -> math"),
            Region("list_tokens", "u32", (2, tokens), 16, "deliver -> math"),
            Region("list_used", "u32", (2, tokens), 16, "deliver -> math"),
        ]
    else:
        rows_apart = plan.num_gather_warps * WARP_THREADS * plan.ordered_bytes // plan.token_k_bytes
        regions += [
            Region("row_offsets", "u32", (rows_apart, tokens // rows_apart), 16, "gather's own"),
            Region("local_rows", "u16", (plan.num_local_pairs,), 4, "head -> schedule"),
        ]
    if plan.expands:
        regions += [
            Region("landed", "u64", (landing,), 8, "load -> expand"),
            Region("taken", "u64", (landing,), 8, "expand -> load"),
        ]
    if plan.num_ranks > 1:
        regions.append(Region("summed", "u64", (1,), 8, "math -> deliver"))
    if plan.has_bias:
        regions.append(Region("bias", "u8", (slots, plan.block_rows * 4), 128, "load -> math"))
    if plan.trace:
        warps = plan.num_threads // WARP_THREADS
        regions.append(Region("trace_rings", "u64", (warps, 2), 16, "a warp's own"))
    return MemoryMap(tuple(regions))
