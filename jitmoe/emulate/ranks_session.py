"""A layer shared out to ranks under one schedule after another, each rank judged by the oracle."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jitmoe import reference
from jitmoe.emulate.compile import executable
from jitmoe.emulate.mega_moe import Call
from jitmoe.emulate.ranks import EmulatedRanks
from jitmoe.emulate.run import EmulationError
from jitmoe.emulate.session import TIMEOUT_S, Outcome, RankOutcome, num_steps
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.variant import DEFAULT, Variant
from jitmoe.reference_biases import Biases, random_biases

NUM_LAUNCHES = 3  # both banks of what ranks write for each other, and the first again


@dataclass(frozen=True)
class RanksSession:
    """Launches one after the other on each rank: `calls` by launch and rank, and `refs`, float64,
    the oracle's y of them. `layers` and `biases` are of each rank's experts.
    """

    plan: MegaMoePlan
    layers: list[reference.Layer]
    biases: list[Biases] | None
    calls: list[list[Call]]
    refs: list[list[np.ndarray]]
    rank_tokens: int
    num_blocks: int
    checked: bool


def rank_counts(rank_tokens: int, num_ranks: int, launch: int) -> list[int]:
    """Tokens of each rank: others on each and in each launch, on one of them `rank_tokens`; in the
    second launch one rank has none.
    """
    shares = [(rank + launch) % num_ranks + 1 for rank in range(num_ranks)]
    counts = [-(-rank_tokens * share // num_ranks) for share in shares]
    return [0 if launch == 1 and share == 1 else n for n, share in zip(counts, shares, strict=True)]


def open_session(
    plan: MegaMoePlan,
    rank_tokens: int,
    routing: str = "uniform",
    num_blocks: int = 4,
    checked: bool = False,
    variant: Variant = DEFAULT,
) -> RanksSession:
    """Random calls for the ranks of `plan`, the same every time; the kernel is built. As
    session.open_session, `rank_tokens` and `num_blocks` are of each rank.
    """
    num_ranks, of_rank = plan.num_ranks, plan.num_experts
    all_experts = num_ranks * of_rank
    tokens = [
        [
            reference.random_tokens(
                count, plan.hidden, all_experts, plan.top_k, 1 + rank + num_ranks * launch, routing
            )
            for rank, count in enumerate(rank_counts(rank_tokens, num_ranks, launch))
        ]
        for launch in range(NUM_LAUNCHES)
    ]
    executable(plan, checked)  # before the weights, which may take long: it may be refused
    sizes, gated = (all_experts, plan.hidden, plan.intermediate), variant.activation.gated
    layer = reference.random_layer(*sizes, seed=0, format=plan.format, gated=gated)
    options, biases = variant.formula, None
    if variant.has_bias:
        biases = random_biases(*sizes, seed=2, gated=gated)
        options |= biases.arguments

    def call(of):
        return Call(of.x.astype(ml_dtypes.bfloat16).view(np.uint16), *of[1:], variant=variant)

    def ref(of):
        inputs = of.x, None, *of[1:], *layer
        return reference.mega_moe(*inputs, requantize=True, format=plan.format, **options)

    return RanksSession(
        plan,
        _shares(layer, num_ranks),
        biases and _shares(biases, num_ranks),
        [[call(of) for of in launch] for launch in tokens],
        [[ref(of) for of in launch] for launch in tokens],
        rank_tokens,
        num_blocks,
        checked,
    )


def _shares(parts: tuple, num_ranks: int) -> list:
    """A Layer or Biases cut into as much for each rank."""
    cut = [[None] * num_ranks if p is None else np.split(p, num_ranks) for p in parts]
    return [type(parts)(*of_rank) for of_rank in zip(*cut, strict=True)]


def run_seed(session: RanksSession, seed: int) -> Outcome:
    """All launches, on a machine of their own, so that a seed means the same alone and among
    others. In odd seeds ranks are held back for long, so that they drift apart; a stall then shows
    as waits that give up.
    """
    start = time.perf_counter()
    ranks = EmulatedRanks(
        session.plan,
        session.layers,
        session.rank_tokens,
        session.num_blocks,
        session.checked,
        session.biases,
    )
    try:
        ys = ranks.run(session.calls, seed=seed, delays=seed % 2 == 1, timeout_s=TIMEOUT_S)
    except EmulationError as error:
        return Outcome(seed, None, None, None, time.perf_counter() - start, str(error).rstrip())
    gave_up = [
        f"rank {number} gave up: wait {what} (templates/device/check.cuh), index {index}, by warp "
        f"{warp} of block {block}"
        for number, rank in enumerate(ranks.ranks)
        for state, what, block, warp, index in [map(int, rank.status[:5])]
        if state
    ]
    if gave_up:
        text = "\n".join([ranks.report.rstrip(), *gave_up])
        return Outcome(seed, None, None, None, time.perf_counter() - start, text)
    seconds = time.perf_counter() - start
    found = [
        _judged(*of_rank)
        for of_rank in zip(zip(*ys, strict=True), zip(*session.refs, strict=True), strict=True)
    ]
    errors = zip(*((one.relative_error, one.worst_element) for one in found), strict=True)
    return Outcome(seed, *map(max, errors), num_steps(ranks.report), seconds, ranks=tuple(found))


def _judged(ys, refs) -> RankOutcome:
    y, ref = np.concatenate(ys), np.concatenate(refs)
    errors = reference.relative_error(y, ref), reference.worst_element(y, ref)
    return RankOutcome(tuple(map(len, ys)), *errors)
