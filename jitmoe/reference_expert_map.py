"""Logical experts with replicas, for the oracle: where the kernel sends ids."""

from __future__ import annotations

import numpy as np


def replicas_of(topk_ids, expert_map, rank: int, num_experts: int, xp=np):
    """Ids of experts for those of logical experts in `topk_ids` [num_tokens, top_k], tokens of
    `rank`: int32, -1 in unused slots.

    expert_map   [num_logical_experts, max_replicas] int32, as mega_moe takes it
    num_experts  of all ranks
    """
    num_logical = expert_map.shape[0]
    is_logical = (topk_ids >= 0) & (topk_ids < num_logical)
    rows = expert_map[xp.where(is_logical, topk_ids, 0)]
    is_expert = (rows >= 0) & (rows < num_experts)
    counts = xp.cumprod(is_expert.astype(xp.int32), axis=-1).sum(axis=-1)
    turns = rank + xp.arange(topk_ids.shape[0])[:, None]
    number = turns % xp.maximum(counts, 1)
    experts = xp.take_along_axis(rows, number[..., None], axis=-1)[..., 0]
    return xp.where(is_logical & (counts > 0), experts, -1).astype(xp.int32)
