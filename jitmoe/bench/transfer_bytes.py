"""Bytes of rows that a dispatch or a combine reads and writes, counted from the tokens' ids.

Rows are counted with their scales, and messages whole where they go from node to node. Ids, router
weights, counts, places, records and what else a message has beside its row on its own rank are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.hybrid import HybridPlan


@dataclass(frozen=True)
class Bytes:
    """put  to other nodes, which were read and written, too"""

    read: int
    written: int
    put: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Traffic:
    """Of all ranks together.

    tokens     of all ranks, whether they have experts or not
    rows       that come to ranks: layout "tokens" one for each sum, "experts" for each used slot
    sums       pairs of a token and a rank that has experts of it
    node_sums  pairs of a token and a node that has
    sent       those of them whose node is not the token's own
    """

    tokens: int
    rows: int
    sums: int
    node_sums: int
    sent: int


def count(plan: DispatchPlan, ids: Sequence, first_expert: int = 0, xp=np) -> Traffic:
    """Of ids [num_tokens, top_k] of each rank, NumPy's or CuPy's as `xp` says."""
    node_ranks = plan.node_ranks if isinstance(plan, HybridPlan) else plan.num_ranks
    tokens = rows = sums = node_sums = sent = 0
    for source, of_rank in enumerate(ids):
        at = of_rank - first_expert
        used = (at >= 0) & (at < plan.num_all_experts)
        on_rank = (at // plan.num_experts)[:, :, None] == xp.arange(plan.num_ranks)
        has = (on_rank & used[:, :, None]).any(1)
        on_node = has.reshape(len(at), plan.num_ranks // node_ranks, node_ranks).any(2)
        tokens += len(at)
        sums += int(has.sum())
        rows += int((used if plan.expert_rows else has).sum())
        node_sums += int(on_node.sum())
        sent += int(on_node.sum() - on_node[:, source // node_ranks].sum())
    return Traffic(tokens, rows, sums, node_sums, sent)


def plain_dispatch(plan: DispatchPlan, traffic: Traffic) -> Bytes:
    """What must move where all ranks reach each other: every bf16 token is read once, every row
    that came is written.
    """
    return Bytes(2 * plan.hidden * traffic.tokens, _row_bytes(plan) * traffic.rows)


def plain_combine(plan: DispatchPlan, traffic: Traffic) -> Bytes:
    """The same: rows and sums of ranks are read, sums of ranks and y are written."""
    width = 2 * plan.hidden
    return Bytes(width * (traffic.rows + traffic.sums), width * (traffic.sums + traffic.tokens))


def dispatch(plan: DispatchPlan, traffic: Traffic) -> Bytes:
    """What the kernel of `plan` moves. Between nodes a token is written to a message of its own
    rank; that is read and written once for each other node it goes to; and where it then lies its
    row is read once for each node and written to every place there.
    """
    plain = plain_dispatch(plan, traffic)
    if not isinstance(plan, HybridPlan):
        return plain
    row, messages = _row_bytes(plan), plan.message_bytes * traffic.sent
    return Bytes(
        plain.read + messages + row * traffic.node_sums,
        row * traffic.tokens + messages + plain.written,
        messages,
    )


def combine(plan: DispatchPlan, traffic: Traffic) -> Bytes:
    """What the combine behind `plan` moves. Between nodes rows become a sum of each rank, these one
    of each node, which is read and written once more where it goes to another node; then nodes'
    sums become y.
    """
    if not isinstance(plan, HybridPlan):
        return plain_combine(plan, traffic)
    width, between = 2 * plan.hidden, traffic.node_sums + traffic.sent
    return Bytes(
        width * (traffic.rows + traffic.sums + between),
        width * (traffic.sums + between + traffic.tokens),
        width * traffic.sent,
    )


def _row_bytes(plan: DispatchPlan) -> int:
    """Of a row that travels to experts, with its scales."""
    return plan.row_bytes + 4 * plan.num_groups
