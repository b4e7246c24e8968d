"""Measurers without a GPU: numbers that follow from the plan, and candidates that misbehave. They
run in the measuring process, where no kernel is built and none is needed.
"""

import os
import time
from pathlib import Path

from jitmoe.bench.work import Work
from jitmoe.tune.pairs import summary

NOISE = (0.0, 0.002, -0.002, 0.001)
# Times of a plan over the heuristic's, by a field.
QUICK = {"num_local_pairs=512": 0.9, "num_stages=4": 0.996, "num_task_slots=2": 1.2}


def measure(trial):
    """10 % quicker with 512 local pairs, level or slower else; the decode plan lies in prefill."""
    factor = QUICK.get(trial.candidate.changes, 1.0)
    heuristic = [100.0 * (1 + part) for part in NOISE]
    candidate = [factor * us for us in heuristic]
    work = Work(8.0, 8.0, 1e8, 1e6, 1e9)
    errors = {"rel_error": 0.022, "rel_error_requantized": 0.004}
    return {"status": "ok"} | errors | summary(heuristic, candidate, work, 4645, 1440)


def misbehave(trial):
    """Every kind of failure, by a field."""
    changes = trial.candidate.changes
    if changes == "num_stages=3":
        os.abort()
    if changes == "num_stages=4":
        time.sleep(600)
    if changes == "num_task_slots=2":
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nand more")
    if changes == "num_task_slots=4":
        return {"status": "wrong", "reason": "off", "rel_error": 0.5}
    return measure(trial)


def slowly(trial):
    """Leaves its process id in $TUNE_PIDS."""
    Path(os.environ["TUNE_PIDS"], str(os.getpid())).touch()
    time.sleep(0.1)
    return measure(trial)
