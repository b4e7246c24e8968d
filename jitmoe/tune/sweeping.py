"""sweep(): every candidate at every point, in rounds, as rows that are written one by one."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from jitmoe.bench.conditions import conditions
from jitmoe.jit.build import Outcome, build_many
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT, Variant
from jitmoe.reference import ROUTINGS
from jitmoe.run.driver import DriverError, device_spec, num_devices
from jitmoe.tune.progress import Progress
from jitmoe.tune.space import candidates
from jitmoe.tune.store import Store
from jitmoe.tune.trial import Trial, key_of, row_of
from jitmoe.tune.winners import heuristics_of, is_ahead, point_of
from jitmoe.tune.worker import Worker

ON_GPU = "jitmoe.tune.on_gpu:measure_trial"
ROUNDS = 2
LIMIT_S = 120.0


class _OutOfBudget(Exception):
    """No further trial is started."""


def sweep(
    problems: MoeProblem | Iterable[MoeProblem],
    space: Mapping[str, Iterable] | None = None,
    *,
    skew: str = "uniform",
    budget_s: float | None = None,
    store: Path | str | None = None,
    variant: Variant = DEFAULT,
    rounds: int = ROUNDS,
    gpu: GpuSpec | None = None,
    measurer: str = ON_GPU,
    limit_s: float = LIMIT_S,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Measure plans beside the heuristic's, each at each problem; the rows of these trials, those
    that were in the store already too, ready for pandas.

    problems  layers with their token counts
    space     as in `jitmoe.tune.space.candidates`: None for fields one at a time, or a mapping of
              plan fields to values, of which every combination is tried
    skew      one of `jitmoe.reference.ROUTINGS`
    budget_s  seconds after which no further trial or build is started
    store     a .jsonl file that rows are appended to, and in which trials that it has are not
              repeated: a sweep that was interrupted or killed goes on where it ended
    variant   of the layers
    rounds    how often what was ahead of the heuristic in all rounds before is measured again, with
              other random numbers and in a new process; `save` wants two
    gpu       that of the rows (default: device 0's)
    measurer  "module:function", as in `jitmoe.tune.worker.Worker`
    limit_s   seconds after which a trial counts as hung

    A candidate that does not compile, crashes, hangs or computes something else is a row, with
    status and reason. Ctrl-C, or a notebook's interrupt, ends the sweep and returns the rows.
    Raises ValueError for a problem, space, skew or store that cannot be, PlanError if no plan fits,
    DriverError without a GPU.
    """
    problems = [problems] if isinstance(problems, MoeProblem) else list(problems)
    _check(problems, skew)
    gpu = gpu or _gpu_here()
    fields = variant.plan_fields
    trials = [
        Trial(problem, variant, skew, gpu, candidate, some[0].plan)
        for problem in dict.fromkeys(problems)
        for some in [candidates(problem, gpu, space, say=say, **fields)]
        for candidate in some
    ]
    deadline = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    with Store(store) as log:
        facts = conditions(gpu.name, _command())
        facts.pop("gpu")
        run = _Run(log, facts, deadline, measurer, limit_s)
        try:
            for _ in range(rounds):
                run.round(trials, say)
                trials = run.goes_on(trials)
        except KeyboardInterrupt:
            say(f"interrupted: {len(run.rows)} rows are kept; call again to go on")
        except _OutOfBudget:
            say(f"the budget of {budget_s:g} s is spent: {len(run.rows)} rows; call again to go on")
        return run.rows


def _gpu_here() -> GpuSpec:
    if num_devices() == 0:
        raise DriverError(
            "a sweep needs a GPU and finds none; see `jitmoe doctor`, or read rows that another "
            "machine has measured by jitmoe.tune.load"
        )
    return device_spec(0)


def _check(problems: list[MoeProblem], skew: str) -> None:
    if skew not in ROUTINGS:
        raise ValueError(f"skew must be one of {', '.join(ROUTINGS)}, got {skew!r}; take one")
    for problem in problems:
        if not isinstance(problem, MoeProblem):
            raise ValueError(f"problems must be of MoeProblem, got {problem!r}")
        if problem.num_tokens == 0:
            raise ValueError(
                "a problem to be measured must have tokens, got num_tokens 0; use "
                "dataclasses.replace(problem, num_tokens=...)"
            )
        if problem.top_k > problem.num_experts and skew != "duplicates":
            raise ValueError(
                f"skew {skew} needs top_k up to the {problem.num_experts} experts, got "
                f"{problem.top_k}; take duplicates"
            )


class _Run:
    """The rows of a sweep, as rounds make them."""

    def __init__(self, log: Store, facts: dict, deadline: float, measurer: str, limit_s: float):
        self.rows: list[dict] = []
        self._log, self._facts, self._deadline = log, facts, deadline
        self._measurer, self._limit_s = measurer, limit_s
        self._known = {key_of(row): row for row in log.rows}

    def round(self, trials: list[Trial], say: Callable[[str], None]) -> None:
        """Measure what is not in the store, layer by layer, each layer's kernels built before."""
        number = trials[0].round if trials else 0
        todo = [trial for trial in trials if trial.key not in self._known]
        self.rows += [self._known[trial.key] for trial in trials if trial.key in self._known]
        if not todo:
            return
        say(f"round {number}: {len(todo)} of {len(trials)} trials to do")
        progress = Progress(len(todo))
        try:
            with Worker(self._measurer) as worker:
                for layer in dict.fromkeys(trial.layer for trial in todo):
                    some = [trial for trial in todo if trial.layer == layer]
                    outcomes = self._build(some)
                    for trial in some:
                        progress.step(self._measure(trial, outcomes, worker))
        finally:
            progress.close()

    def goes_on(self, trials: Iterable[Trial]) -> list[Trial]:
        """Of a round's trials those that were ahead of the heuristic, and the heuristic's beside
        such; of the next round.
        """
        rows = [(trial, self._known[trial.key]) for trial in trials]
        heuristics = heuristics_of(row for _, row in rows)
        ahead = {
            trial: row
            for trial, row in rows
            if is_ahead(row, heuristics.get((*point_of(row), row["round"])))
        }
        problems = {trial.problem for trial in ahead}
        return [
            replace(trial, round=trial.round + 1)
            for trial, row in rows
            if trial in ahead or (row["is_heuristic"] and trial.problem in problems)
        ]

    def _build(self, trials: list[Trial]) -> dict[MegaMoePlan, Outcome]:
        """Kernels of the candidates and of the heuristic's plans beside them."""
        plans = dict.fromkeys(plan for trial in trials for plan in (trial.heuristic, trial.plan))
        outcomes = {}
        for outcome in build_many(plans):
            outcomes[outcome.plan] = outcome
            self._check_budget()
        return outcomes

    def _measure(self, trial: Trial, outcomes: dict, worker: Worker) -> dict:
        self._check_budget()
        error = outcomes[trial.heuristic].error or outcomes[trial.plan].error
        if error is None:
            outcome = worker.ask(trial, self._limit_s)
        else:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            outcome = {"status": "failed", "reason": reason}
        now = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        row = row_of(trial, outcome, outcomes[trial.plan].built, self._facts | now)
        self._known[trial.key] = row
        self.rows.append(row)
        self._log.append(row)  # last: it waits for the disk, and an interrupt then keeps the row
        return row

    def _check_budget(self) -> None:
        if time.monotonic() > self._deadline:
            raise _OutOfBudget


def _command() -> str:
    """The command line, if it is ours."""
    program = Path(sys.argv[0])
    is_ours = program.name == "jitmoe" or program.parts[-2:] == ("jitmoe", "__main__.py")
    return shlex.join(["jitmoe", *sys.argv[1:]]) if is_ours else "jitmoe.tune.sweep"
