"""What a traced launch comes to: how busy roles are, what they wait for, how it starts and ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitmoe.tracing.events import CODES, EVENTS, Timeline, is_wait


@dataclass(frozen=True)
class Summary:
    """Times are in `unit`; fractions are of the launch, of the mean warp of a role.

    busy           by role: in the head or a task and not waiting
    waits          by role and wait: time a warp spent
    mma            fraction that math spends in main loops and not waiting for stages
    first_mma      launch to first multiply, of the median block
    mma_end_spread from the first block's last multiply to the last block's
    tail           from the last multiply to the end
    resolution     least difference of two stamps' times: the clock's step, or a little more
    """

    unit: str
    duration: int
    num_blocks: int
    num_events: int
    num_lost: int
    busy: dict[str, float]
    waits: dict[str, dict[str, float]]
    mma: float
    first_mma: float
    mma_end_spread: int
    tail: int
    resolution: int


def summarize(timeline: Timeline) -> Summary:
    """The Summary of a launch. Raises ValueError where there are no multiplies to speak of."""
    events, duration = timeline.events, max(timeline.duration, 1)
    mma = timeline.select("mma")
    if len(mma) == 0:
        raise ValueError(
            "the trace must hold a main loop, got none; trace a call that uses experts"
        )
    span = (events["end_ns"] - events["begin_ns"]).astype(np.float64)
    waits, outermost = is_wait(events), events["depth"] == 0
    busy, waited = {}, {}
    for number, role in enumerate(timeline.roles):
        of_role = events["role"] == number
        num_warps = _num_warps(events[of_role])
        if num_warps == 0:
            continue
        work = span[of_role & outermost & ~waits].sum() - span[of_role & ~outermost & waits].sum()
        busy[role] = float(work / (num_warps * duration))
        totals = np.bincount(events["event"][of_role & waits], span[of_role & waits])
        waited[role] = {
            EVENTS[code].removeprefix("wait "): float(totals[code] / num_warps)
            for code in np.flatnonzero(totals)
        }
    in_math = events["role"] == timeline.roles.index("math")
    num_warps = _num_warps(events[in_math])
    stalled = in_math & (events["event"] == CODES["wait stage full"]) & (events["depth"] > 1)
    multiplied = (mma["end_ns"] - mma["begin_ns"]).sum() - span[stalled].sum()
    blocks = np.unique(mma["block"])
    starts = [mma["begin_ns"][mma["block"] == b].min() for b in blocks]
    ends = [mma["end_ns"][mma["block"] == b].max() for b in blocks]
    times = np.unique(np.concatenate([events["begin_ns"], events["end_ns"]]))
    return Summary(
        unit=timeline.unit,
        duration=timeline.duration,
        num_blocks=len(np.unique(events["block"])),
        num_events=len(events),
        num_lost=timeline.num_lost,
        busy=busy,
        waits=waited,
        mma=float(multiplied / (num_warps * duration)),
        first_mma=float(np.median(starts)),
        mma_end_spread=int(max(ends) - min(ends)),
        tail=timeline.duration - int(max(ends)),
        resolution=int(np.diff(times).min(initial=duration)),
    )


def _num_warps(events: np.ndarray) -> int:
    """Of all blocks."""
    return len(np.unique(events["block"].astype(np.uint32) << 8 | events["warp"]))
