"""The least a routed call must move and compute, and the floor that follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np

from jitmoe.plan.heuristics import Floor
from jitmoe.plan.problem import MoeProblem


@dataclass(frozen=True)
class Work:
    """Of one call, or the mean of several: hence floats.

    num_pairs         used slots
    num_active        experts that at least one slot names
    weight_bytes      of those experts, each once
    activation_bytes  x, scales, ids, router weights and y
    flop              of the two GEMMs
    """

    num_pairs: float
    num_active: float
    weight_bytes: float
    activation_bytes: float
    flop: float

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes

    def floor(self, read_gbps: float, tflops: float) -> Floor:
        """The least time at these sustained rates in GB/s and TFLOP/s."""
        return Floor(self.num_bytes / read_gbps * 1e-3, self.flop / tflops * 1e-6)


def work_of(layer: MoeProblem, topk_ids: np.ndarray) -> Work:
    """The work of a call with `topk_ids` int [num_tokens, top_k]; ids out of range are unused."""
    ids = topk_ids[(topk_ids >= 0) & (topk_ids < layer.num_experts)]
    num_active = len(np.unique(ids))
    return Work(
        num_pairs=float(ids.size),
        num_active=float(num_active),
        weight_bytes=float(num_active * layer.expert_bytes),
        activation_bytes=float(layer.activation_bytes),
        flop=float(ids.size * layer.pair_flop),
    )


def mean_work(works: Iterable[Work]) -> Work:
    """The mean of at least one."""
    columns = zip(*map(astuple, works), strict=True)
    return Work(*(sum(column) / len(column) for column in columns))
