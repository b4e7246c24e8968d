"""Maps from the ids of all ranks' experts to the numbers of those that are here."""

from __future__ import annotations

import torch


def first_expert_of(expert_map: torch.Tensor, num_experts: int) -> int | None:
    """The id of the first of `num_experts` experts that the map has in a row; None for another map.

    Read once and kept with the tensor, until that is written; a write through `.data` leaves no
    trace. None too for a map that cannot be read now, in a capture, or leaves no trace of writes.
    """
    if expert_map.is_inference():  # has no version
        return None
    state = expert_map.data_ptr(), expert_map._version, num_experts
    known = getattr(expert_map, "_jitmoe_first", None)
    if known is None or known[0] != state:
        if expert_map.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        numbers = expert_map.tolist()
        first = numbers.index(0) if 0 in numbers else 0
        row = [-1] * first + list(range(num_experts))
        is_row = numbers == row + [-1] * (len(numbers) - len(row))
        known = expert_map._jitmoe_first = state, first if is_row else None
    return known[1]


def ids_here(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """The numbers here of the experts that ids name, -1 for those that are not here."""
    last = expert_map.shape[0] - 1
    is_known = (topk_ids >= 0) & (topk_ids <= last)
    return torch.where(is_known, expert_map[topk_ids.clamp(0, last).long()], -1)
