"""A layer's kernel under one schedule after another, each launch judged by the oracle."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jitmoe import reference
from jitmoe.emulate.compile import executable
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.emulate.run import EmulationError
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT, Variant
from jitmoe.reference_biases import Biases, random_biases

ERROR_BOUND = 5e-3  # bf16 slices and sums; the emulated tensor cores add exactly
ELEMENT_BOUND = 0.25  # four re-quantised codes on the other side of a tie in one sum
TIMEOUT_S = 86_400.0  # the emulator finds stalls by itself; large layers take hours

# Of one core, to an order of magnitude: random weights quantised, and multiply-adds emulated.
_WEIGHTS_PER_S, _MACS_PER_S = 1e7, 2e8
_CHECKED_FACTOR = 20.0
_LEAST_PAIRS = 8  # an expert's tile costs as much as this many tokens, though there be one


@dataclass(frozen=True)
class Session:
    """One call: what its launches share. x is bf16 bits; `ref` is the oracle's y, float64."""

    plan: MegaMoePlan
    layer: reference.Layer
    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    ref: np.ndarray
    num_blocks: int
    checked: bool
    variant: Variant
    biases: Biases | None = None


@dataclass(frozen=True)
class RankOutcome:
    """What a rank got: its tokens in each launch, and the errors of all their y together."""

    num_tokens: tuple[int, ...]
    relative_error: float
    worst_element: float


@dataclass(frozen=True)
class Outcome:
    """What became of a launch, or of several on many ranks, under the schedule of `seed`.

    The errors of y are None and `steps`, of the scheduler, are too if a launch did not come to its
    end; `report` then says why. Of many ranks they are the largest of `ranks`.
    """

    seed: int
    relative_error: float | None
    worst_element: float | None
    steps: int | None
    seconds: float
    report: str = ""
    ranks: tuple[RankOutcome, ...] = ()

    @property
    def is_right(self) -> bool:
        return (
            self.relative_error is not None
            and self.relative_error < ERROR_BOUND
            and self.worst_element < ELEMENT_BOUND
        )


def open_session(
    plan: MegaMoePlan,
    num_tokens: int,
    routing: str = "uniform",
    num_blocks: int = 4,
    checked: bool = False,
    variant: Variant = DEFAULT,
) -> Session:
    """A random call for `plan`, the same every time; the kernel is built.

    routing     one of `reference.ROUTINGS`
    num_blocks  blocks of the grid
    checked     whether data races and undefined behaviour are looked for: some 20 times slower
    variant     of which `plan` has the fields

    Raises ValueError for a routing that does not exist or fit, NoHostCompiler, HostCompileError.
    """
    sizes = plan.num_experts, plan.hidden, plan.intermediate
    tokens = reference.random_tokens(
        num_tokens, plan.hidden, plan.num_experts, plan.top_k, seed=1, routing=routing
    )
    executable(plan, checked)  # before the weights, which may take long: it may be refused
    gated = variant.activation.gated
    layer = reference.random_layer(*sizes, seed=0, format=plan.format, gated=gated)
    call = tokens.x, None, *tokens[1:], *layer
    options, biases = variant.formula, None
    if variant.has_bias:
        biases = random_biases(*sizes, seed=2, gated=gated)
        options |= biases.arguments
    ref = reference.mega_moe(*call, requantize=True, format=plan.format, **options)
    x = tokens.x.astype(ml_dtypes.bfloat16).view(np.uint16)
    return Session(plan, layer, x, *tokens[1:], ref, num_blocks, checked, variant, biases)


def run_seed(session: Session, seed: int) -> Outcome:
    """One launch on a machine of its own, so that a seed means the same alone and among others."""
    start = time.perf_counter()
    emulated = EmulatedLayer(
        session.plan,
        session.layer,
        len(session.x),
        session.num_blocks,
        session.checked,
        session.biases,
    )
    inputs = session.x, session.topk_ids, session.topk_weights
    try:
        y = emulated(*inputs, session.variant, seed=seed, timeout_s=TIMEOUT_S)
    except EmulationError as error:
        return Outcome(seed, None, None, None, time.perf_counter() - start, str(error).rstrip())
    seconds = time.perf_counter() - start
    steps = num_steps(emulated.report)
    errors = reference.relative_error(y, session.ref), reference.worst_element(y, session.ref)
    return Outcome(seed, *errors, steps, seconds)


def num_steps(report: str) -> int:
    """Of the scheduler, as the emulator reports them."""
    return int(re.search(r"(\d+) steps", report)[1])


def run_seeds(
    run: Callable[[int], Outcome], seeds: Iterable[int], jobs: int = 1
) -> Iterator[Outcome]:
    """Outcomes of `run` in the order of `seeds` up to the first that is wrong, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:  # a launch is a process: threads only wait for it
        try:
            for outcome in pool.map(run, seeds):
                yield outcome
                if not outcome.is_right:
                    return
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def expected_seconds(problem: MoeProblem, checked: bool = False) -> tuple[float, float]:
    """About how long a session of such a call takes to open, and a launch of it to run."""
    of_expert = problem.pair_flop // 2  # a multiply-add for each weight
    weights = problem.num_experts * of_expert
    macs = max(problem.num_pairs, _LEAST_PAIRS * problem.num_active_experts) * of_expert
    return weights / _WEIGHTS_PER_S, macs / _MACS_PER_S * (_CHECKED_FACTOR if checked else 1.0)
