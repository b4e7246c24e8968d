"""The measurer of sweeps on a GPU: one trial, checked against the oracle, then timed.

Candidate and heuristic are graphs of the same calls, replayed in bursts by turns; each pair of
bursts gives one ratio, so that drifts of clock and memory touch both alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from jitmoe import measure
from jitmoe.bench import methods, times
from jitmoe.bench.points import ZIPF_EXPONENT, calls_per_graph
from jitmoe.bench.rows import significant
from jitmoe.bench.setting import free
from jitmoe.bench.trial import is_poisoned, poison
from jitmoe.bench.work import mean_work, work_of
from jitmoe.tune.pairs import summary
from jitmoe.tune.trial import Trial

NUM_PAIRS = 8
IDLE_S = times.IDLE_S / 4  # before a burst

_NESTED = ("layer", "point", "heuristic")  # a new one outside is a new one inside
_kept: dict[str, tuple] = {}  # of these: (what it is of, it)


def measure_trial(trial: Trial) -> dict:
    """An outcome. Raises whatever a kernel that does not run raises."""
    weights, experts = _keep(
        "layer",
        (trial.layer, trial.variant),
        lambda: measure.weight_sets(trial.layer, variant=trial.variant),
    )
    of_point = (trial.problem, trial.variant, trial.skew, trial.round)
    calls, references, work = _keep("point", of_point, lambda: _point(trial, experts))
    method = methods.of_jitmoe(trial.problem, calls, weights, trial.plan)
    max_error = methods.JITMOE[trial.problem.format].max_error
    y = method.call(0)
    method.stream.synchronize()
    method.check()
    errors = measure.errors(y, references)
    if not errors.exact <= max_error:
        return _wrong(errors, f"allowed is a relative error of {max_error:g}")
    for i in range(1, method.num_calls):
        method.call(i)
    launch, ys = method.capture()
    _, heuristic, stream = _keep("heuristic", of_point, lambda: _heuristic(trial, calls, weights))
    poison(ys)
    samples = _pairs(heuristic, stream, launch, method)
    method.check()
    if is_poisoned(ys):
        return _wrong(errors, "the graph left NaN in an output")
    replayed = measure.errors(ys[0], references)
    if not replayed.exact <= max_error:
        return _wrong(replayed, "the graph gives another result than an eager call")
    rates = trial.gpu.read_gbps, trial.gpu.tflops(trial.problem.format)
    return {"status": "ok"} | _fields(errors) | summary(*samples, work, *rates)


def _wrong(errors: measure.Errors, reason: str) -> dict:
    return {"status": "wrong", "reason": reason} | _fields(errors)


def _fields(errors: measure.Errors) -> dict:
    return {
        "rel_error": significant(errors.exact, 4),
        "rel_error_requantized": significant(errors.requantized, 4),
    }


def _keep(name: str, key: tuple, make: Callable[[], tuple]):
    """What was made for the last trial of the same key; else it is freed and made anew."""
    if _kept.get(name, (None, None))[0] != key:
        for inner in _NESTED[_NESTED.index(name) :]:
            _kept.pop(inner, None)
        gc.collect()
        free()
        _kept[name] = key, make()
    return _kept[name][1]


def _point(trial: Trial, experts) -> tuple:
    import cupy

    layer, num_calls = trial.problem, calls_per_graph(trial.problem.num_tokens)
    options = {"routing": trial.skew, "zipf_exponent": ZIPF_EXPONENT, "variant": trial.variant}
    seeds = range(num_calls * (trial.round - 1), num_calls * trial.round)
    calls = [measure.random_call(layer, seed, **options) for seed in seeds]
    work = mean_work(work_of(layer, cupy.asnumpy(call.topk_ids)) for call in calls)
    return calls, measure.references(calls[0], experts), work


def _heuristic(trial: Trial, calls: list, weights: list) -> tuple:
    method = methods.of_jitmoe(trial.problem, calls, weights, trial.heuristic)
    for i in range(method.num_calls):
        method.call(i)
    method.stream.synchronize()
    method.check()
    launch, _ = method.capture()
    return method, launch, method.stream


def _pairs(heuristic, stream, launch, method) -> tuple[list, list]:
    """Microseconds of a call in bursts by turns, the first of a pair by turns too."""
    sides = ((heuristic, stream), (launch, method.stream))
    replays = [
        times.replays_per_burst(min(times.burst(*side, 1) for _ in range(2))) for side in sides
    ]
    samples = [], []
    for number in range(NUM_PAIRS):
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            time.sleep(IDLE_S)
            samples[i].append(times.burst(*sides[i], replays[i]) / method.num_calls)
    return samples
