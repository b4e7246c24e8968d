"""What a dispatch returns, and the handle that combine and later dispatches take."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.hybrid import HybridPlan
from jitmoe.plan.memory_map import MemoryMap, Region
from jitmoe.run import families
from jitmoe.run.streams import on_stream
from jitmoe.run.symmetric import Group


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Where the tokens of one rank went, and what came to it. Its memory is its own: it outlives
    later dispatches, and serves any number of combines and dispatches of the same shapes.

    group           of the ranks
    plan            the DispatchPlan
    num_tokens      of this rank
    max_num_tokens  of any rank
    rank            whose it is
    family          of the arrays that go with it: "cupy" or "torch"
    received        tokens and rows that came, if the dispatch was exact, else None
    channel_tokens  tokens of a channel of a dispatch between nodes, else 0
    """

    group: Group
    plan: DispatchPlan
    num_tokens: int
    max_num_tokens: int
    rank: int
    family: str
    memory: object  # a CuPy uint32 array
    received: tuple[int, int] | None = None
    channel_tokens: int = 0

    @property
    def room(self) -> tuple[int, int]:
        """Tokens and rows that arrays have room for: those that came, or the most that can."""
        most = self.plan.num_ranks * self.max_num_tokens, self.plan.num_rows(self.max_num_tokens)
        return self.received or most

    @property
    def regions(self) -> MemoryMap:
        return handle_regions(self.plan, self.num_tokens, self.max_num_tokens)

    def address(self, name: str) -> int:
        return self.memory.data.ptr + self.regions.offsets[name]

    def array(self, name: str):
        """A region as a CuPy uint32 array of its shape."""
        [region] = [r for r in self.regions.regions if r.name == name]
        first = self.regions.offsets[name] // 4
        return self.memory[first : first + prod(region.shape)].reshape(region.shape)


@lru_cache(4096)
def handle_regions(plan: DispatchPlan, num_tokens: int, max_num_tokens: int) -> MemoryMap:
    """What a dispatch leaves on a rank for combine: templates/roles/records.cuh."""
    records = plan.num_ranks * max_num_tokens
    between_nodes = ()
    if isinstance(plan, HybridPlan):
        between_nodes = (
            Region("forwarded", "u32", (plan.num_nodes, max_num_tokens, 2), 256),
            Region("source_starts", "u32", (plan.num_ranks + 1,), 256),
        )
    return MemoryMap(
        (
            Region("places", "u32", (num_tokens, plan.top_k, 2), 256),
            Region("own_records", "u32", (records, plan.record_words), 256),
            Region("expert_counts", "u32", (plan.num_experts,), 256),
            Region("expert_starts", "u32", (plan.num_experts + 1,), 256),
            Region("num_received", "u32", (2,), 256),
            *between_nodes,
        )
    )


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What came to a rank. `rows` is the number of rows that arrays have: those that came if the
    dispatch was exact, else the most that can come; rows beyond those that came hold nothing.

    x              [rows, hidden] bf16, or with format "fp8" a pair of e4m3 and f32 scales [rows,
                   hidden / 128]. Layout "tokens": a row for each token that came, in the order of
                   ranks and of tokens there; "experts": a row for each of a token's experts here,
                   expert by expert, each in that order. Memory of the workspace: it holds until the
                   next dispatch with that workspace, or the next call that makes it grow
    topk_ids       [tokens, top_k] int32: experts of this rank from 0 on, -1 for those of others
    topk_weights   [tokens, top_k] f32, 0 for those of others
    expert_counts  [num_experts / ranks] int32: slots of tokens that each expert got
    expert_starts  [num_experts / ranks + 1] int32: layout "experts", the first row of each, a
                   multiple of the alignment, and the end
    num_received   [2] int32, on the GPU: tokens and rows that came, those between experts included
    num_tokens, num_rows
                   the same as numbers if the dispatch was exact, else None
    handle         for combine
    """

    x: object
    topk_ids: object
    topk_weights: object
    expert_counts: object
    expert_starts: object
    num_received: object
    num_tokens: int | None
    num_rows: int | None
    handle: DispatchHandle


def new_handle(
    group: Group,
    plan: DispatchPlan,
    num_tokens: int,
    max_num_tokens: int,
    rank: int,
    family: str,
    stream: int,
) -> DispatchHandle:
    """With memory of its own on the group's device, free for others behind the work of `stream`."""
    import cupy

    words = handle_regions(plan, num_tokens, max_num_tokens).num_bytes // 4
    with cupy.cuda.Device(group.device):
        is_current = cupy.cuda.get_current_stream().ptr == stream
        with nullcontext() if is_current else on_stream(stream):
            memory = cupy.empty(words, cupy.uint32)
    return DispatchHandle(group, plan, num_tokens, max_num_tokens, rank, family, memory)


def dispatched(handle: DispatchHandle, rows: int, row_scales: int) -> Dispatched:
    """Arrays over a handle and over rows and scales at these addresses."""
    import cupy

    plan, room = handle.plan, handle.room
    num_tokens, num_rows = handle.received or (None, None)
    device = handle.group.device

    def array(address: int, num_columns: int, dtype):
        size = max(room[1] * num_columns * np.dtype(dtype).itemsize, 1)
        memory = cupy.cuda.UnownedMemory(address, size, handle, device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((room[1], num_columns), dtype, pointer)

    def own(words, dtype=np.int32):
        return families.as_family(words.view(dtype), handle.family)

    records = handle.array("own_records")[: room[0]]
    ids, weights = (records[:, 2 + i * plan.top_k :][:, : plan.top_k] for i in (0, 1))
    if plan.format == "fp8":
        x = (
            families.as_family(array(rows, plan.hidden, np.uint8), handle.family, "e4m3"),
            families.as_family(array(row_scales, plan.num_groups, np.float32), handle.family),
        )
    else:
        x = families.as_family(array(rows, plan.hidden, np.uint16), handle.family, "bf16")
    return Dispatched(
        x,
        own(ids),
        own(weights, np.float32),
        own(handle.array("expert_counts")),
        own(handle.array("expert_starts")),
        own(handle.array("num_received")),
        num_tokens,
        num_rows,
        handle,
    )
