"""Times of a captured CUDA graph: bursts on a cool card and on a hot one, and of the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

HEATS = ("cool", "hot")
BURST_US = 12_000  # short enough for the clock to stay up, long enough to hide a launch
# Before each cool burst. Small calls heat the card too where instructions bind them: 64 tokens of
# S1 in MXFP4 take 209 us after it, 226 without (H200, 2026-12-01).
IDLE_S = 0.2
HOT_S = 1.0  # of continuous work, after which the power cap has lowered the clock
NUM_HOST_CALLS = 20


@dataclass(frozen=True)
class Times:
    """Microseconds: median and deciles of bursts."""

    median: float
    p10: float
    p90: float


def summary(samples: list[float]) -> Times:
    """Of at least one sample; deciles are the extremes where samples are few."""
    if len(samples) < 3:
        return Times(statistics.median(samples), min(samples), max(samples))
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Times(statistics.median(samples), deciles[0], deciles[-1])


def replays_per_burst(replay_us: float) -> int:
    return max(1, round(BURST_US / max(replay_us, 1e-3)))


def measure(
    launch: Callable[[], None],
    stream,
    num_calls: int,
    heat: str,
    num_bursts: int,
) -> Times:
    """Times of one of the `num_calls` calls that `launch` enqueues on the CuPy stream.

    heat        cool: each burst after `IDLE_S` of idleness; hot: all after a second of work
    num_bursts  each of about `BURST_US`, and one sample
    """
    replay_us = min(burst(launch, stream, 1) for _ in range(2))
    num_replays = replays_per_burst(replay_us)
    if heat == "hot":
        start = time.perf_counter()
        while time.perf_counter() - start < HOT_S:
            burst(launch, stream, num_replays)
    samples = []
    for _ in range(num_bursts):
        if heat == "cool":
            time.sleep(IDLE_S)
        samples.append(burst(launch, stream, num_replays) / num_calls)
    return summary(samples)


def burst(launch, stream, num_replays: int) -> float:
    """Microseconds of one of `num_replays` calls of `launch` in a row on the CuPy stream."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(stream)
    for _ in range(num_replays):
        launch()
    end.record(stream)
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) * 1e3 / num_replays


def host_us(call: Callable[[], object], stream) -> float:
    """Median microseconds that the host spends on an eager call."""
    stream.synchronize()
    samples = []
    for _ in range(NUM_HOST_CALLS):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    stream.synchronize()
    return statistics.median(samples)
