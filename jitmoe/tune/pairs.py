"""Samples of a candidate beside those of the heuristic, as numbers of a row."""

from __future__ import annotations

import statistics

from jitmoe.bench import times
from jitmoe.bench.work import Work


def summary(
    heuristic: list[float], candidate: list[float], work: Work, read_gbps: float, tflops: float
) -> dict:
    """Of microseconds, pair by pair: medians, what the candidate gains, and how sure that is.

    gain   median over pairs of heuristic / candidate, less 1: positive where the candidate is
           quicker
    noise  half of what lies between the first and the last decile of these ratios
    """
    mine, floor = times.summary(candidate), work.floor(read_gbps, tflops)
    ratios = times.summary([a / b for a, b in zip(heuristic, candidate, strict=True)])
    return {
        "us_median": round(mine.median, 2),
        "us_min": round(min(candidate), 2),
        "us_p90": round(mine.p90, 2),
        "heuristic_us": round(statistics.median(heuristic), 2),
        "gain": round(ratios.median - 1, 5),
        "noise": round((ratios.p90 - ratios.p10) / 2, 5),
        "tflops": round(work.flop / mine.median * 1e-6, 1),
        "gbps": round(work.num_bytes / mine.median * 1e-3),
        "floor_us": round(floor.us, 2),
        "bound": floor.bound,
        "of_floor": round(floor.us / mine.median, 3),
    }
