"""The fused layer of several ranks, emulated: a launch on each, which share symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jitmoe.emulate.mega_moe import Call, EmulatedLayer
from jitmoe.emulate.run import Array, launch
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.mega_moe_params import SYMMETRIC
from jitmoe.reference import Layer
from jitmoe.reference_biases import Biases


class EmulatedRanks:
    """What outlives the launches of a group of ranks.

    plan         a MegaMoePlan of num_ranks ranks, each a launch of its own (local_ranks 1)
    layers       the experts of each rank, in the plan's format
    rank_tokens  room for tokens of each rank
    num_blocks   blocks of each rank's grid
    checked      whether data races and undefined behaviour are looked for
    biases       of each rank's experts, of a plan that has them
    beside       ranks of another plan, of the other bucket say, that take turns with these: both
                 use one symmetric memory
    expert_counts
                 of each rank, what launches add the routed pairs of its experts to, or None
    """

    def __init__(
        self,
        plan: MegaMoePlan,
        layers: Sequence[Layer],
        rank_tokens: int,
        num_blocks: int = 4,
        checked: bool = False,
        biases: Sequence[Biases] | None = None,
        beside: EmulatedRanks | None = None,
        expert_counts: Sequence[np.ndarray] | None = None,
    ):
        assert len(layers) == plan.num_ranks and plan.local_ranks == 1
        self.plan, self.rank_tokens = plan, rank_tokens
        num_tokens, nothing = plan.num_ranks * rank_tokens, [None] * len(layers)
        self.ranks = [
            EmulatedLayer(plan, layer, num_tokens, num_blocks, checked, own, counts)
            for layer, own, counts in zip(
                layers, biases or nothing, expert_counts or nothing, strict=True
            )
        ]
        self.map = plan.symmetric(rank_tokens)
        assert beside is None or beside.map == self.map
        self.symmetric = beside.symmetric if beside else [self._poisoned() for _ in layers]
        self.report = ""

    def _poisoned(self) -> np.ndarray:
        """A rank's symmetric memory before its first launch: 0xFF but for what must be zero."""
        memory = np.full(self.map.num_bytes, 0xFF, np.uint8)
        for offset, num_bytes in self.map.zeroed:
            memory[offset : offset + num_bytes] = 0
        return memory

    def __call__(self, calls: Sequence[Call | tuple], **options) -> list[np.ndarray]:
        """One launch on every rank: y of each, bf16 bits. Options as in `launch`; `rank_tokens` is
        the bound that all ranks agree on, at most the room (default), or one for each rank, which
        the kernel refuses if they differ; `expert_map` as in mega_moe (default: ids are those of
        experts).
        """
        return self.run([calls], **options)[0]

    def run(
        self,
        rounds: Sequence[Sequence[Call | tuple]],
        *,
        rank_tokens: int | Sequence[int] | None = None,
        expert_map: np.ndarray | None = None,
        **options,
    ) -> list[list[np.ndarray]]:
        """Launches one after the other on every rank, a call for each rank in a round: y by round
        and rank. Ranks drift apart as far as the kernel lets them.
        """
        bounds = self.rank_tokens if rank_tokens is None else rank_tokens
        bounds = [bounds] * len(self.ranks) if isinstance(bounds, int) else bounds
        memories = [Array(memory, writable=True) for memory in self.symmetric]
        shared = [rank._shared_arrays() for rank in self.ranks]
        if expert_map is not None:
            assert expert_map.dtype == np.int32 and expert_map.ndim == 2
            for arrays in shared:
                arrays["expert_map"] = Array(np.ascontiguousarray(expert_map))
        launches, ys = [], []
        for calls in rounds:
            ys.append([])
            for number, call in enumerate(calls):
                one, y = self._launch(number, Call(*call), shared[number], memories, bounds[number])
                launches.append(one)
                ys[-1].append(y)
        executable = self.ranks[0].executable
        self.report = launch(executable, self.plan, launches, in_stream=True, **options)
        return ys

    @staticmethod
    def _map_scalars(expert_map: Array | None) -> dict[str, int]:
        if expert_map is None:
            return {}
        num_logical, max_replicas = expert_map.data.shape
        return {"num_logical_experts": num_logical, "max_replicas": max_replicas}

    def _launch(self, number: int, call: Call, shared: dict, memories: list, rank_tokens: int):
        plan = self.plan
        one, y = self.ranks[number]._rank(call, shared)
        own_tokens = y.shape[0]
        assert own_tokens <= rank_tokens <= self.rank_tokens
        peers = {8 * rank: (rank, "symmetric") for rank in range(plan.num_ranks)}
        arrays = dict(one.arrays) | {
            "symmetric": memories[number],
            "peers": Array(np.zeros(plan.num_ranks, np.uint64), True, peers),
        }
        scalars = dict(one.scalars) | {
            **{f"{name}_at": self.map.offsets[name] for name in SYMMETRIC},
            "num_tokens": plan.num_ranks * rank_tokens,
            "rank": number,
            "rank_tokens": rank_tokens,
            "num_own_tokens": own_tokens,
            "rank_capacity": self.rank_tokens,
            "first_expert": number * plan.num_experts,
            **self._map_scalars(shared.get("expert_map")),
        }
        return replace(one, arrays=arrays, scalars=scalars, stream=number), y
