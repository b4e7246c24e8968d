"""A layer on the ranks of a LocalGroup, beside one rank that has all experts and all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jitmoe import links, measure
from jitmoe.bench import methods
from jitmoe.bench.points import ZIPF_EXPONENT, Points, calls_per_graph
from jitmoe.bench.rows import Point
from jitmoe.bench.setting import Setting, free
from jitmoe.bench.trial import Result, attempt, trial
from jitmoe.bench.work import mean_work, work_of
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.symmetric import LocalGroup
from jitmoe.weights import ExpertWeights

ORACLE_TOKENS = 8192  # of more, the oracle takes a rank's at a time


def plans(
    points: Points, gpu: GpuSpec, layer: MoeProblem, num_tokens: int
) -> tuple[MegaMoePlan, MegaMoePlan]:
    """Of one rank with all, and of the ranks of a LocalGroup."""
    fields, ranks = points.variant.plan_fields, points.num_ranks
    of_ranks = {"num_ranks": ranks, "local_ranks": ranks, "presum": points.presum}
    sized = replace(layer, num_tokens=num_tokens)
    return (
        heuristics.choose(points.whole(layer, num_tokens), gpu, **fields),
        heuristics.choose(sized, gpu, **fields, **of_ranks),
    )


@dataclass(frozen=True)
class _Layer:
    """A rank's share of a layer, and sets of weights: of all ranks together, and by rank."""

    name: str
    of_rank: MoeProblem
    experts: measure.Experts  # of the first set
    weights: list[ExpertWeights]
    shares: list[list[ExpertWeights]]


def layer_rows(name: str, of_rank: MoeProblem, setting: Setting):
    """Yields rows, returns how many points they are of."""
    points, num_points = setting.points, 0
    variant = points.variant
    sets = measure.expert_sets(
        points.whole(of_rank, 0), variant=variant, spare_bytes=_spare_bytes(of_rank, setting)
    )
    kind = of_rank.format, variant.gate_up
    weights = [one.weights(*kind) for one in sets]
    shares = [[share.weights(*kind) for share in one.of_ranks(points.num_ranks)] for one in sets]
    layer = _Layer(name, of_rank, sets[0], weights, shares)
    for num_tokens in points.tokens:
        if setting.is_over:
            break
        yield from _point_rows(layer, num_tokens, setting)
        num_points += 1
    return num_points


def _spare_bytes(of_rank: MoeProblem, setting: Setting) -> int:
    """What weights must leave free for the largest of the points: workspaces, calls, oracle."""
    points = setting.points
    most = max(points.tokens)
    whole = points.whole(of_rank, most)
    one, on_ranks = plans(points, setting.gpu, of_rank, most)
    bytes_of_rank = on_ranks.workspace_bytes(whole.num_tokens) + on_ranks.symmetric(most).num_bytes
    workspaces = max(one.workspace_bytes(whole.num_tokens), points.num_ranks * bytes_of_rank)
    calls = calls_per_graph(whole.num_tokens) * whole.activation_bytes
    references = 2 * 8 * whole.num_tokens * whole.hidden
    return measure.SPARE_BYTES + workspaces + calls + references


def _point_rows(layer: _Layer, num_tokens: int, setting: Setting):
    """One rank with all, whose rows are those of a layer of its own, then the ranks."""
    import cupy

    points, num_ranks = setting.points, setting.points.num_ranks
    whole = points.whole(layer.of_rank, num_tokens)
    calls = [
        measure.random_call(
            whole,
            seed,
            routing=points.routing,
            zipf_exponent=ZIPF_EXPONENT,
            variant=points.variant,
        )
        for seed in range(calls_per_graph(whole.num_tokens))
    ]
    ids = [cupy.asnumpy(call.topk_ids) for call in calls]
    work, num_sets = mean_work(work_of(whole, one) for one in ids), len(layer.weights)
    is_cold = work.weight_bytes * min(num_sets, len(calls)) > setting.gpu.l2_bytes
    facts = points.routing, work, num_sets, is_cold, points.variant.activation.kind
    ours = methods.JITMOE[whole.format]
    judged = ours, _references(calls[0], layer.experts, num_ranks), setting.protocol

    one = _result(lambda: trial(methods.of_jitmoe(whole, calls, layer.weights), *judged))
    yield from setting.rows(Point(f"{layer.name} x {num_ranks}", whole, *facts), ours, one)

    def on_ranks() -> Result:
        with LocalGroup(num_ranks) as group:
            method = methods.of_ranks(whole, calls, layer.shares, group, points.presum)
            return trial(method, *judged)

    sized = replace(layer.of_rank, num_tokens=num_tokens)
    found = [link for each in ids for link in links.counted_links(sized, np.split(each, num_ranks))]
    extra = {"group": "LocalGroup", "presum": points.presum}
    extra |= {"link_bytes": _link_bytes(links.mean_links(found), points.presum)}
    point = Point(layer.name, sized, *facts, num_ranks=num_ranks)
    for row in setting.rows(point, ours, _result(on_ranks)):
        yield row | extra | _beside(row, one)


def _references(call: measure.Call, experts: measure.Experts, num_ranks: int):
    """What the oracle makes of a call, a rank's tokens at a time where all are too many."""
    if len(call.topk_ids) <= ORACLE_TOKENS:
        return measure.references(call, experts)
    parts = [measure.references(one, experts) for one in call.of_ranks(num_ranks)]
    xp = measure.oracle_namespace()
    return measure.References(*(xp.concatenate(part) for part in zip(*parts, strict=True)))


def _result(run: Callable[[], Result]) -> Result:
    """What memory does not suffice for is a result, and what was used is given back."""
    result, failed = attempt(run)
    free()
    return result or failed


def _link_bytes(mean: links.Links, presum: bool) -> dict[str, int]:
    """That a rank sends in a call, on average."""
    return {name: round(n) for name, n in (vars(mean) | {"moved": mean.moved(presum)}).items()}


def _beside(row: dict, one: Result) -> dict:
    """The time of one rank with all, and ours in it."""
    times = (one.times or {}).get(row["heat"])
    us = times and round(times.median, 2)
    ratio = round(row["us_median"] / us, 4) if us and row["us_median"] else None
    return {"one_rank_us": us, "of_one_rank": ratio}
