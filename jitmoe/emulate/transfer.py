"""Dispatch and combine of several ranks, emulated: a launch each, over symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from jitmoe.emulate.compile import executable
from jitmoe.emulate.run import Array, Rank, launch
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.hybrid import HybridPlan
from jitmoe.plan.scales import token_strides
from jitmoe.plan.transfer import TransferPlan
from jitmoe.plan.transfer_pairs import combine_of

_TIMEOUT_US = 30_000_000


@dataclass
class Sent:
    """What a dispatch leaves on a rank: arrays of a handle, of which tests read all.

    places         [num_tokens, top_k, 2] u32: rank << 26 | token there, and row there
    records        [num_ranks * rank_tokens, record_words] u32, of tokens that came
    expert_counts  [num_experts] u32
    expert_starts  [num_experts + 1] u32
    num_received   [2] u32: tokens, rows
    host_received  [2] u32: the first plus 1
    forwarded      [num_nodes, most tokens of a rank, 2] u32: what went on here, several nodes only
    source_starts  [num_ranks + 1] u32: first token here of each rank, the same
    channel_tokens of the launch, the same
    """

    places: np.ndarray
    records: np.ndarray
    expert_counts: np.ndarray
    expert_starts: np.ndarray
    num_received: np.ndarray
    host_received: np.ndarray
    forwarded: np.ndarray | None = None
    source_starts: np.ndarray | None = None
    channel_tokens: int = 0

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """As parameters, the same objects in all launches, which share their memory so."""
        names = {"records": "own_records"}
        return {
            names.get(f.name, f.name): Array(getattr(self, f.name), writable=True)
            for f in fields(self)
            if isinstance(getattr(self, f.name), np.ndarray)
        }


class EmulatedTransfer:
    """Ranks that dispatch and combine.

    plan          a TransferPlan's fields, of ranks with a launch each (local_ranks 1)
    rank_tokens   room for tokens of each rank
    num_blocks    blocks of each rank's grid
    checked       whether data races and undefined behaviour are looked for
    first_expert  id of expert 0 of rank 0
    """

    def __init__(
        self,
        plan: DispatchPlan,
        rank_tokens: int,
        num_blocks: int = 3,
        checked: bool = False,
        first_expert: int = 0,
    ):
        assert plan.local_ranks == 1
        self.plans = plan, combine_of(plan)
        self.executables = [executable(one, checked) for one in self.plans]
        self.rank_tokens, self.num_blocks = rank_tokens, num_blocks
        self.first_expert = first_expert
        self.map = plan.symmetric(rank_tokens)
        assert self.map == self.plans[1].symmetric(rank_tokens)
        ranks = range(plan.num_ranks)
        self.symmetric = [self._poisoned() for _ in ranks]
        self.status = [np.zeros(16, np.uint32) for _ in ranks]
        # By rank, and control by plan too: the same objects in all launches.
        self._shared = [self._shared_arrays(rank) for rank in ranks]
        self._controls = [[self._control(one) for one in self.plans] for _ in ranks]
        self.report = ""

    def _shared_arrays(self, rank: int) -> dict[str, Array]:
        counts = np.full(self.plans[0].scratch(self.rank_tokens).num_bytes, 0xFF, np.uint8)
        return {
            "symmetric": Array(self.symmetric[rank], writable=True),
            "status": Array(self.status[rank], writable=True),
            "block_counts": Array(counts, writable=True),
        }

    def _control(self, plan: TransferPlan) -> dict[str, Array]:
        regions = plan.control(self.rank_tokens).regions
        return {r.name: Array(np.zeros(r.num_bytes, np.uint8), writable=True) for r in regions}

    def _poisoned(self) -> np.ndarray:
        memory = np.full(self.map.num_bytes, 0xFF, np.uint8)
        for offset, num_bytes in self.map.zeroed:
            memory[offset : offset + num_bytes] = 0
        return memory

    def region(self, rank: int, name: str, dtype=np.uint8) -> np.ndarray:
        """A region of a rank's symmetric memory, a row for each of its first dimension."""
        [region] = [r for r in self.map.regions if r.name == name]
        begin = self.map.offsets[name]
        data = self.symmetric[rank][begin : begin + region.num_bytes].view(dtype)
        return data.reshape(region.shape[0], data.size // max(region.shape[0], 1))

    def dispatch(
        self, calls: Sequence, sent: Sequence[Sent] | None = None, **options
    ) -> list[Sent]:
        """One launch on every rank. A call is (x, topk_ids, topk_weights) with x bf16 bits, or
        (codes, scales) for fp8. With `sent` of an earlier launch, places are those, and ids and
        weights are not passed. Options as in `launch`.
        """
        return self.dispatches([calls], sent, **options)[0]

    def dispatches(
        self,
        rounds: Sequence[Sequence],
        sent: Sequence[Sent] | None = None,
        num_cached: int = 0,
        **options,
    ) -> list[list[Sent]]:
        """Launches one after the other on every rank; ranks drift apart as far as the kernel lets
        them. The last `num_cached` have the places of the first.
        """
        launches, found = [], []
        for turn, calls in enumerate(rounds):
            kept = sent or (found[0] if turn >= len(rounds) - num_cached else None)
            found.append(kept or [self._empty(call[1].shape[0]) for call in calls])
            for number, (call, own) in enumerate(zip(calls, found[-1], strict=True)):
                launches.append(self._dispatch(number, *call, own, is_cached=kept is not None))
        self._run(0, launches, options)
        return found

    def _dispatch(self, number: int, x, ids, weights, sent: Sent, is_cached: bool) -> Rank:
        codes, scales = x if isinstance(x, tuple) else (x, None)
        token, group = 0, 0
        if scales is not None:
            token, group = token_strides(scales.shape, scales.strides, *codes.shape)
        arrays = {"x": Array(codes), **sent.arrays}
        if not is_cached:
            arrays |= {"topk_ids": Array(ids), "topk_weights": Array(weights)}
        if scales is not None:
            arrays["x_scale"] = Array(scales)
        scalars = {
            "x_stride": codes.strides[0] if len(codes) else 0,
            "x_scale_token_stride": token // 4,
            "x_scale_group_stride": group // 4,
            "num_tokens": len(codes),
            "x_is_bf16": codes.dtype == np.uint16,
            "ids_are_i64": ids.dtype == np.int64,
            "weights_are_bf16": weights.dtype == np.uint16,
            "first_expert": self.first_expert,
            "is_cached": is_cached,
        }
        return self._rank(0, number, arrays, scalars, sent)

    def combine(
        self,
        rows: Sequence[np.ndarray],
        sent: Sequence[Sent],
        biases: Sequence[Sequence[np.ndarray]] | None = None,
        weighted: bool = True,
        num_launches: int = 1,
        **options,
    ) -> list[np.ndarray]:
        """Launches on every rank, of rows [rows, hidden] bf16 bits: y of each after the last, bf16
        bits.
        """
        return self.combines([rows] * num_launches, sent, biases, weighted, **options)[-1]

    def combines(
        self,
        rounds: Sequence[Sequence[np.ndarray]],
        sent: Sequence[Sent],
        biases: Sequence[Sequence[np.ndarray]] | None = None,
        weighted: bool = True,
        **options,
    ) -> list[list[np.ndarray]]:
        """Launches one after the other on every rank, of rows of their own: y of each."""
        plan, width = self.plans[1], 2 * self.plans[1].hidden
        launches, found = [], []
        for rows in rounds:
            found.append(ys := [])
            for number, (data, own) in enumerate(zip(rows, sent, strict=True)):
                ys.append(np.full((own.places.shape[0], plan.hidden), 0xFFFF, np.uint16))
                kept = {"places", "own_records", "num_received"}
                kept |= own.arrays.keys() & {"forwarded", "source_starts"}
                arrays = {n: own.arrays[n] for n in kept}
                arrays |= {"rows_out": Array(data), "y": Array(ys[-1], writable=True)}
                scalars = {"rows_stride": width, "y_stride": width, "is_weighted": weighted}
                for i, bias in enumerate(biases[number] if biases else ()):
                    arrays[f"bias_{i}"] = Array(bias)
                    scalars[f"bias_{i}_stride"] = width
                scalars["num_tokens"] = len(ys[-1])
                launches.append(self._rank(1, number, arrays, scalars, own))
        self._run(1, launches, options)
        return found

    def _run(self, which: int, launches: Sequence[Rank], options: dict) -> None:
        executable, plan = self.executables[which], self.plans[which]
        self.report = launch(executable, plan, launches, in_stream=True, **options)

    def _empty(self, num_tokens: int) -> Sent:
        plan = self.plans[0]
        experts = plan.num_experts

        def poison(*shape):
            return np.full(shape, 0xFFFFFFFF, np.uint32)

        sent = Sent(
            poison(num_tokens, plan.top_k, 2),
            poison(plan.num_ranks * self.rank_tokens, plan.record_words),
            poison(experts),
            poison(experts + 1),
            poison(2),
            np.zeros(2, np.uint32),
        )
        if isinstance(plan, HybridPlan):
            # Not poison, which would end a list that lacks its end.
            sent.forwarded = np.full((plan.num_nodes, self.rank_tokens, 2), 0x01010101, np.uint32)
            sent.source_starts = poison(plan.num_ranks + 1)
            sent.channel_tokens = plan.channel_tokens(self.rank_tokens, self.num_blocks)
        return sent

    def _rank(self, which: int, number: int, arrays: dict, scalars: dict, sent: Sent) -> Rank:
        plan = self.plans[which]
        assert scalars["num_tokens"] <= self.rank_tokens
        arrays = arrays | self._shared[number] | self._controls[number][which]
        scalars = scalars | {
            **{f"{name}_at": self.map.offsets[name] for name in plan.symmetric_names},
            "rank": number,
            "bank_words": plan.bank_words(self.rank_tokens),
            "timeout_us": _TIMEOUT_US,
        }
        reached = range(plan.num_ranks)
        if isinstance(plan, HybridPlan):
            place, size = number % plan.node_ranks, plan.node_ranks
            reached = range(number - place, number - place + size)
            # The network card's; the kernel itself finds null where it must not reach.
            peers = {8 * node: node * size + place for node in range(plan.num_nodes)}
            arrays["rail_peers"] = _table(plan.num_nodes, peers)
            of_launch = plan.channel_tokens(self.rank_tokens, self.num_blocks)
            scalars |= {
                "rank_capacity": self.rank_tokens,
                "rank_tokens": self.rank_tokens,
                # A combine has those of its dispatch, a dispatch its own whatever its places are.
                "channel_tokens": of_launch if which == 0 else sent.channel_tokens,
            }
        arrays["peers"] = _table(plan.num_ranks, {8 * rank: rank for rank in reached})
        return Rank(arrays, scalars, {}, self.num_blocks, stream=number)


def _table(size: int, ranks: dict[int, int]) -> Array:
    """Addresses of ranks' symmetric memory, by bytes into the table; null elsewhere."""
    where = {at: (rank, "symmetric") for at, rank in ranks.items()}
    return Array(np.zeros(size, np.uint64), True, where)
