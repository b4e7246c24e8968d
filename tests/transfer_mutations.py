"""Cases of tests/mutations.py for dispatch and combine: ranks that drift apart, against NumPy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from transfer_reference import (
    LAYOUTS,
    check_combined,
    check_dispatched,
    check_handles,
    check_no_sums,
    combined,
    make_plan,
    random_calls,
    random_rows,
)

from jitmoe import fp8
from jitmoe.emulate.compile import build
from jitmoe.emulate.run import EmulationError
from jitmoe.emulate.transfer import EmulatedTransfer, Sent
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.hybrid_dispatch import HybridDispatchPlan
from jitmoe.plan.transfer import TransferPlan

DISPATCH, COMBINE = 0, 1  # kernels of EmulatedTransfer


@dataclass(frozen=True)
class TransferCase:
    """One of the two kernels and its launches: numbers of tokens of each rank, one after another.

    num_cached    launches of dispatch that follow, with places of the first
    num_launches  of combine, with rows of their own
    schedules     for each that the others have
    """

    kernel: int
    shared: DispatchPlan
    token_counts: tuple[tuple[int, ...], ...]
    routing: str = "uniform"
    num_blocks: int = 2
    first_expert: int = 0
    num_cached: int = 0
    num_launches: int = 4
    num_biases: int = 0
    schedules: int = 1

    @cached_property
    def plan(self) -> TransferPlan:
        return self.emulated().plans[self.kernel]

    def emulated(self, checked: bool = False) -> EmulatedTransfer:
        room = max(map(max, self.token_counts))
        return EmulatedTransfer(self.shared, room, self.num_blocks, checked, self.first_expert)

    def run(self, text: str, seed: int) -> str | None:
        """How the kernel in `text` fails under one schedule: a line; None if it does not."""
        emulated = self.emulated(checked=True)
        emulated.executables[self.kernel] = build(text, self.plan.name, checked=True)
        options = {"seed": seed, "delays": seed % 2 == 1, "timeout_s": 60}
        try:
            if self.kernel == DISPATCH:
                self._dispatch(emulated, seed, options)
            else:
                self._combine(emulated, seed, options)
        except EmulationError as error:
            return str(error).splitlines()[0]
        except AssertionError:
            return "wrong result"
        return None

    def _dispatch(self, emulated: EmulatedTransfer, seed: int, options: dict) -> None:
        plan, rounds = emulated.plans[0], rounds_of(self)
        again = [_again(rounds[0], turn + 1) for turn in range(self.num_cached)]
        launches = [
            _typed(calls, plan.format, seed + turn) for turn, calls in enumerate(rounds + again)
        ]
        found = emulated.dispatches(launches, num_cached=self.num_cached, **options)
        for calls, sent in zip(launches[: len(rounds)], found, strict=False):
            check_handles(plan, calls, sent, self.first_expert)
        placed = launches[0 if self.num_cached else -1]
        last = [(new[0], *old[1:]) for new, old in zip(launches[-1], placed, strict=True)]
        check_dispatched(emulated, last, found[-1], self.first_expert)
        check_no_sums(emulated)
        if not isinstance(plan, HybridDispatchPlan):
            return
        # What it left for combine alone: lists of what went on.
        rng = np.random.default_rng(seed)
        rows = [random_rows(rng, own.num_received[1], plan.hidden) for own in found[-1]]
        ys = emulated.combine(rows, found[-1], timeout_s=60)
        check_combined(ys, combined(plan, placed, found[-1], rows))

    def _combine(self, emulated: EmulatedTransfer, seed: int, options: dict) -> None:
        calls, sent = sent_of(self)
        rng, plan, weighted = np.random.default_rng(seed), emulated.plans[0], seed % 4 != 3
        rounds = [
            [random_rows(rng, own.num_received[1], plan.hidden) for own in sent]
            for _ in range(self.num_launches)
        ]
        biases = [
            [random_rows(rng, len(ids), plan.hidden) for _ in range(self.num_biases)]
            for _, ids, _ in calls
        ]
        found = emulated.combines(rounds, sent, biases, weighted, **options)
        for rows, ys in zip(rounds, found, strict=True):
            check_combined(ys, combined(plan, calls, sent, rows, biases, weighted))


@cache
def rounds_of(case: TransferCase) -> list:
    """Inputs of every launch: (x, ids, weights) of each rank."""
    return [
        random_calls(case.shared, counts, 10 * turn, case.routing, case.first_expert)
        for turn, counts in enumerate(case.token_counts)
    ]


@cache
def _dispatched(case: TransferCase) -> list[Sent]:
    return case.emulated().dispatch(rounds_of(case)[0])


def sent_of(case: TransferCase) -> tuple[list, list[Sent]]:
    """Inputs of a dispatch, and copies of what the original leaves."""
    sent = [dataclasses.replace(own) for own in _dispatched(case)]
    return rounds_of(case)[0], copy.deepcopy(sent)


def _typed(calls: Sequence, format: str, number: int) -> list:
    """The same in other types now and then."""
    ids_type = np.int64 if number % 2 else np.int32
    weights_as = fp8.encode_bf16 if number // 2 % 2 else np.asarray
    x_as = np.asarray
    if format == "fp8" and number % 3 == 1:
        x_as = _quantized
    return [(x_as(x), ids.astype(ids_type), weights_as(weights)) for x, ids, weights in calls]


def _quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return fp8.quantize_tokens(fp8.decode_bf16(x))


def _again(calls: Sequence, number: int) -> list:
    """Other tokens to the same places."""
    return [(np.roll(x, 8 * number, axis=1), *routing) for x, *routing in calls]


def _case(
    kernel: int, sizes: tuple[int, ...], token_counts, layout: str, **changes
) -> TransferCase:
    """`sizes` are ranks, hidden, experts of a rank, top_k."""
    names = {f.name for f in dataclasses.fields(HybridDispatchPlan)} & changes.keys()
    of_plan = LAYOUTS[layout] | {name: changes.pop(name) for name in names}
    return TransferCase(kernel, make_plan(*sizes, **of_plan), token_counts, **changes)


# Uneven and empty ranks; blocks without tokens; more rows of a warp than it has buffers, of which
# there are two or one; more ranks than warps that count; more experts than lanes; more groups of
# channels than lanes; launches of all kinds behind each other. Those that find most come first.
CASES = (
    _case(DISPATCH, (3, 256, 4, 3), ((5, 0, 9), (12, 3, 1)), "experts, fp8", first_expert=5),
    _case(DISPATCH, (3, 640, 4, 4), ((6, 2, 5), (0, 6, 1)), "tokens", num_blocks=3, num_cached=1),
    _case(COMBINE, (3, 640, 4, 4), ((20, 2, 5),), "tokens", num_biases=2),
    _case(COMBINE, (2, 1032, 8, 12), ((6, 9),), "experts", num_blocks=3, num_biases=1),
    _case(DISPATCH, (3, 4224, 4, 2), ((4, 2, 0), (1, 5, 3)), "tokens, fp8", num_cached=2),
    _case(DISPATCH, (3, 128, 4, 3), ((64, 3, 0), (2, 70, 1)), "tokens", num_blocks=1),
    _case(DISPATCH, (2, 5120, 4, 2), ((40, 2), (1, 40)), "tokens", num_blocks=1),
    _case(DISPATCH, (5, 128, 40, 32), ((9, 0, 2, 3, 1), (3, 3, 0, 7, 0)), "experts"),
    _case(COMBINE, (5, 128, 40, 32), ((9, 0, 2, 3, 1),), "experts"),
    # Between nodes: a network card and memory; blocks without channels and channels of several
    # messages; nodes of one rank and of several.
    _case(
        *(DISPATCH, (4, 128, 3, 3), ((5, 0, 3, 1), (1, 6, 0, 4)), "tokens, fp8"),
        **{"num_nodes": 2, "rail": "gin", "num_cached": 1},
    ),
    _case(
        *(DISPATCH, (6, 128, 2, 4), ((45, 0, 9, 1, 3, 5), (2, 4, 0, 0, 19, 1)), "experts"),
        **{"num_nodes": 3, "rail": "memory", "num_blocks": 1, "first_expert": 5},
    ),
    _case(
        *(COMBINE, (4, 264, 3, 3), ((5, 0, 9, 20),), "tokens"),
        **{"num_nodes": 2, "rail": "gin", "num_biases": 1},
    ),
    _case(
        *(COMBINE, (6, 1032, 2, 4), ((7, 0, 9, 1, 3, 5),), "experts"),
        **{"num_nodes": 3, "rail": "memory", "num_blocks": 1, "num_biases": 2},
    ),
)
