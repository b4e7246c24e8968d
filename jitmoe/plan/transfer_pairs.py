"""Which plans of dispatch and combine go together, inside one domain and between nodes."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

from jitmoe.plan.combine import CombinePlan
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.hybrid import HybridPlan
from jitmoe.plan.hybrid_combine import HybridCombinePlan
from jitmoe.plan.hybrid_dispatch import HybridDispatchPlan
from jitmoe.plan.transfer import TransferPlan


def dispatch_plan(*shape, num_nodes: int = 1, rail: str = "memory", **options) -> DispatchPlan:
    """A DispatchPlan of these fields, or a HybridDispatchPlan for several nodes."""
    if num_nodes == 1:
        return DispatchPlan(*shape, **options)
    return HybridDispatchPlan(*shape, num_nodes=num_nodes, rail=rail, **options)


@cache
def combine_of(plan: DispatchPlan) -> CombinePlan:
    """The combine of what such a dispatch sent: over the same symmetric memory."""
    is_hybrid = isinstance(plan, HybridPlan)
    shared, kind = (HybridPlan, HybridCombinePlan) if is_hybrid else (TransferPlan, CombinePlan)
    return kind(**{f.name: getattr(plan, f.name) for f in fields(shared)})
