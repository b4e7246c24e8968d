"""What a dispatch returns, and the handle that combine and later dispatches take."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
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

    @cached_property
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

    handle: DispatchHandle
    row_addresses: tuple[int, int]  # and of their scales

    # Arrays are made when they are asked for: a call takes less of the host's time.

    @cached_property
    def x(self):
        plan, (rows, scales) = self.handle.plan, self.row_addresses
        if plan.format == "bf16":
            return self._rows(rows, plan.hidden, np.uint16, "bf16")
        codes = self._rows(rows, plan.hidden, np.uint8, "e4m3")
        return codes, self._rows(scales, plan.num_groups, np.float32)

    @cached_property
    def topk_ids(self):
        return self._record_columns(0, np.int32)

    @cached_property
    def topk_weights(self):
        return self._record_columns(1, np.float32)

    @cached_property
    def expert_counts(self):
        return self._own(self.handle.array("expert_counts"))

    @cached_property
    def expert_starts(self):
        return self._own(self.handle.array("expert_starts"))

    @cached_property
    def num_received(self):
        return self._own(self.handle.array("num_received"))

    @property
    def num_tokens(self) -> int | None:
        return None if self.handle.received is None else self.handle.received[0]

    @property
    def num_rows(self) -> int | None:
        return None if self.handle.received is None else self.handle.received[1]

    def _own(self, words, dtype=np.int32):
        return families.as_family(words.view(dtype), self.handle.family)

    def _record_columns(self, part: int, dtype):
        """One of the parts of records that have a word for each slot."""
        k, records = self.handle.plan.top_k, self.handle.array("own_records")
        return self._own(records[: self.handle.room[0], 2 + part * k :][:, :k], dtype)

    def _rows(self, address: int, num_columns: int, dtype, meaning: str | None = None):
        import cupy

        num_rows = self.handle.room[1]
        size = max(num_rows * num_columns * np.dtype(dtype).itemsize, 1)
        memory = cupy.cuda.UnownedMemory(address, size, self.handle, self.handle.group.device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        array = cupy.ndarray((num_rows, num_columns), dtype, pointer)
        return families.as_family(array, self.handle.family, meaning)


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
