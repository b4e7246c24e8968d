"""Tuning sweeps, from a notebook or `jitmoe tune`: candidates, rows, winners, tuned files, plots.

rows = jitmoe.tune.sweep(problems, budget_s=300, store="sweep.jsonl")
jitmoe.tune.save(rows)  # plans that beat the heuristic's twice, for calls from now on
"""

from jitmoe.tune import plot
from jitmoe.tune.store import load
from jitmoe.tune.sweeping import sweep
from jitmoe.tune.winners import best, compare, save

__all__ = ["best", "compare", "load", "plot", "save", "sweep"]
