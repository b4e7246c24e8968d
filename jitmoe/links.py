"""Bytes that leave a rank over links in a call on many ranks, counted or expected, three ways."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from jitmoe.plan.formats import format_of
from jitmoe.plan.memory_map import ceil_div
from jitmoe.plan.problem import QUANT_GROUP, MoeProblem

TABLE_BYTES = 8  # of a slot in the tables of routing: an expert and a router weight


@dataclass(frozen=True)
class Links:
    """Of one rank, or the mean of several: hence floats.

    pairs     a token goes out and a row comes back for each routed pair whose expert is remote
    once      a token goes to a rank once, rows come back for each pair: presum=False
    presum    a token goes to a rank once, and one row comes back from it: presum=True
    tables    routing that is published to all other ranks, on top of each of these
    """

    pairs: float
    once: float
    presum: float
    tables: float

    def moved(self, presum: bool) -> float:
        """What the kernel moves."""
        return (self.presum if presum else self.once) + self.tables

    @property
    def saved(self) -> float:
        """The share of `pairs` that `presum` does without."""
        return 1.0 - self.presum / self.pairs if self.pairs else 0.0


def token_bytes(layer: MoeProblem) -> int:
    """Of a token as ranks fetch it: e4m3 with an f32 scale per 128 channels, or bf16."""
    form = format_of(layer.format)
    scales = 4 * ceil_div(layer.hidden, QUANT_GROUP) if form.quantizes else 0
    return form.element_bytes * layer.hidden + scales


def row_bytes(layer: MoeProblem) -> int:
    """Of a row that comes back, in bf16."""
    return 2 * layer.hidden


def table_bytes(layer: MoeProblem, num_ranks: int) -> int:
    """Of a rank's routing at all others, for the most tokens of a rank."""
    return (num_ranks - 1) * layer.num_pairs * TABLE_BYTES


def expected_links(layer: MoeProblem, num_ranks: int) -> Links:
    """Where every token of every rank draws top_k distinct experts of all ranks uniformly.

    layer  a rank's share of the experts, and its tokens
    """
    of_rank, of_all = layer.num_experts, num_ranks * layer.num_experts
    if layer.top_k > of_all:
        raise ValueError(
            f"top_k must be up to the {of_all} experts of all ranks, got {layer.top_k}; "
            "take fewer slots"
        )
    used = 1.0 - comb(of_all - of_rank, layer.top_k) / comb(of_all, layer.top_k)
    pairs = layer.num_pairs * (num_ranks - 1) / num_ranks
    once = layer.num_tokens * (num_ranks - 1) * used
    return _links(layer, num_ranks, pairs, once, pairs, once)


def counted_links(layer: MoeProblem, topk_ids: list[np.ndarray]) -> list[Links]:
    """Of each rank, where `topk_ids` are those of each, int [num_tokens, top_k] up to the tokens of
    `layer`; ids outside of all ranks' experts are unused slots.
    """
    ranks = range(len(topk_ids))
    homes = [ids // layer.num_experts for ids in topk_ids]  # of the experts
    pairs = np.array([[(home == rank).sum() for rank in ranks] for home in homes])
    once = np.array([[(home == rank).any(axis=1).sum() for rank in ranks] for home in homes])
    for counts in (pairs, once):  # by rank of the token, by rank of the expert
        np.fill_diagonal(counts, 0)
    sent = [counts.sum(axis=1) for counts in (pairs, once)]
    returned = [counts.sum(axis=0) for counts in (pairs, once)]
    return [
        _links(layer, len(topk_ids), *map(float, counts))
        for counts in zip(*sent, *returned, strict=True)
    ]


def mean_links(links: list[Links]) -> Links:
    """The mean of at least one."""
    columns = zip(*(vars(one).values() for one in links), strict=True)
    return Links(*(sum(column) / len(column) for column in columns))


def _links(layer, num_ranks, pairs_out, tokens_out, pairs_back, tokens_back) -> Links:
    token, row = token_bytes(layer), row_bytes(layer)
    return Links(
        pairs=token * pairs_out + row * pairs_back,
        once=token * tokens_out + row * pairs_back,
        presum=token * tokens_out + row * tokens_back,
        tables=float(table_bytes(layer, num_ranks)),
    )
