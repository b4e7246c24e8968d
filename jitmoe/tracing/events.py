"""Stamps of a traced launch -> events: who did what, and who waited for what, from when to when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitmoe.jit.render import role_ranges
from jitmoe.plan.mega_moe import MegaMoePlan

# By the numbers of `enum Event` in templates/device/events.cuh and `enum Wait` in check.cuh.
WAIT = 16
EVENTS = {
    1: "head",
    2: "task",
    3: "mma",
    4: "epilogue",
    5: "combine",
    WAIT + 1: "wait stage full",
    WAIT + 2: "wait stage empty",
    WAIT + 3: "wait task full",
    WAIT + 4: "wait task empty",
    WAIT + 5: "wait grid barrier",
    WAIT + 6: "wait head",
    WAIT + 7: "wait mid",
    WAIT + 8: "wait tile stored",
    WAIT + 9: "wait list full",
    WAIT + 10: "wait preloaded",
    WAIT + 11: "wait task wanted",
    WAIT + 12: "wait landed",
    WAIT + 13: "wait taken",
    WAIT + 14: "wait summed",
    WAIT + 15: "wait pairs",
    WAIT + 16: "wait tokens",
    WAIT + 17: "wait expert",
    WAIT + 18: "wait bound",
    WAIT + 19: "wait counts",
    WAIT + 20: "wait rows",
    WAIT + 21: "wait sums wanted",
    WAIT + 22: "wait sums",
    WAIT + 23: "wait rail",
    WAIT + 24: "wait messages",
    WAIT + 25: "wait mates",
    WAIT + 26: "wait home",
    WAIT + 27: "wait flush",
}
CODES = {name: code for code, name in EVENTS.items()}
_STEPS = [CODES[name] for name in ("mma", "epilogue", "combine")]  # of a task, one after the other

_END, _WHOLE, _EVENT, _NUMBER = 128, 64, 63, 8  # of a stamp's second word: flags, mask, shift

EVENT_DTYPE = np.dtype(
    [
        ("block", "u2"),
        ("warp", "u1"),
        ("role", "u1"),  # number in Timeline.roles
        ("event", "u1"),  # number in EVENTS
        ("depth", "u1"),  # events of the warp around this one
        ("payload", "u8"),  # see task_fields; a wait's index
        ("begin_ns", "i8"),
        ("end_ns", "i8"),
    ]
)


@dataclass(frozen=True, eq=False)
class Timeline:
    """A launch as events.

    events    EVENT_DTYPE [num_events] by block, warp and begin; time 0 is the first begin
    roles     names by number
    unit      of the times: "ns", or "steps" of the emulator's scheduler
    num_lost  oldest stamps that a full ring dropped; without any, every event is here
    """

    events: np.ndarray
    roles: tuple[str, ...]
    unit: str
    num_lost: int

    @property
    def duration(self) -> int:
        """From the first begin to the last end."""
        return int(self.events["end_ns"].max(initial=0))

    def select(self, event: str | None = None, role: str | None = None) -> np.ndarray:
        """The events of one name, of one role, or both."""
        chosen = np.ones(len(self.events), bool)
        if event is not None:
            chosen &= self.events["event"] == CODES[event]
        if role is not None:
            chosen &= self.events["role"] == self.roles.index(role)
        return self.events[chosen]


def is_wait(events: np.ndarray) -> np.ndarray:
    return events["event"] >= WAIT


def task_fields(payload: np.ndarray) -> dict[str, np.ndarray]:
    """What the payload of a "task" says; phase 0 is GEMM 1, and block one of token rows."""
    return {
        "phase": payload >> 31 & 1,
        "expert": payload >> 16 & 0x7FFF,
        "tile": payload & 0xFFFF,
        "block": payload >> 32,
    }


def _ended_steps(ring: np.ndarray, what: np.ndarray) -> np.ndarray:
    """By stamp, in the order of their rings: the step that it ends, by beginning another of the
    same task or ending the task; 0 where it ends none.
    """
    event, is_end = what & _EVENT, what & _END != 0
    is_step, is_task = np.isin(event, _STEPS), event == CODES["task"]
    marks = np.where(is_step | is_task, np.arange(len(what)), -1)
    before = np.concatenate(([-1], np.maximum.accumulate(marks)[:-1])) if len(marks) else marks
    is_open = (before >= 0) & (ring[before] == ring) & is_step[before]
    return np.where(is_open & (is_step | is_task & is_end), event[before], 0)


def decode(rings: np.ndarray, plan: MegaMoePlan, unit: str = "ns") -> Timeline:
    """The events of a launch from its rings of stamps, zero where nothing was written.

    rings  u32 [num_blocks, num_warps, capacity, 4], as templates/device/stamps.cuh writes them

    Takes launches of up to 2 s (times are 32-bit numbers) and 2^24 stamps a warp.
    """
    num_warps, capacity = rings.shape[1:3]
    stamps = rings.reshape(-1, capacity, 4)
    ring, place = np.nonzero(stamps[..., 1])
    time, what, low, high = stamps[ring, place].T
    number = what >> _NUMBER
    order = np.lexsort((number, ring))
    ring, time, what, low, high, number = (a[order] for a in (ring, time, what, low, high, number))
    written = number[np.flatnonzero(np.diff(ring, append=-1))].astype(np.int64) + 1  # by ring
    num_lost = int(written.sum()) - len(number)

    # Some stamps stand for two: a whole event's for its begin and, at `high`, its end; another
    # that ends a step for that end too, before it.
    whole, ended = what & _WHOLE != 0, _ended_steps(ring, what)
    times = 1 + (whole | (ended != 0))
    last = np.cumsum(times) - 1
    whole, ends = last[whole], last[ended != 0] - 1
    ring, time, what, low, high, number = (
        np.repeat(a, times) for a in (ring, time, what, low, high, number)
    )
    time[whole], what[whole], high[whole - 1] = high[whole], what[whole] | _END, 0
    what[ends] = ended[ended != 0] | _END
    event, is_end = what & _EVENT, what & _END != 0

    # Open events before each stamp, counted from the ring's first; a begin that was dropped makes
    # that negative.
    step = np.where(is_end, -1, 1)
    level = np.cumsum(step) - step
    first = np.flatnonzero(np.diff(ring, prepend=-1))
    sizes = np.diff(first, append=len(ring))
    level -= np.repeat(np.minimum.reduceat(level + np.minimum(step, 0), first), sizes)

    # An event does not nest in its own kind: of one ring and kind, begin and end alternate.
    by_kind = np.lexsort((number, event, ring))
    begins, ends = by_kind[:-1], by_kind[1:]
    paired = (ring[begins] == ring[ends]) & (event[begins] == event[ends])
    paired &= ~is_end[begins] & is_end[ends]
    begins, ends = begins[paired], ends[paired]
    by_begin = np.argsort(begins)
    begins, ends = begins[by_begin], ends[by_begin]

    ranges = role_ranges(plan.roles)
    role_of_warp = np.repeat(np.arange(len(ranges)), [r.end - r.begin for r in ranges])
    since = (time - time[:1]).astype(np.int32).astype(np.int64)  # wraps as the clock does
    since -= since.min(initial=0)
    events = np.empty(len(begins), EVENT_DTYPE)
    events["block"], events["warp"] = np.divmod(ring[begins], num_warps)
    events["role"] = role_of_warp[events["warp"]]
    events["event"], events["depth"] = event[begins], level[begins]
    events["payload"] = low[begins] | high[begins].astype(np.uint64) << np.uint64(32)
    events["begin_ns"], events["end_ns"] = since[begins], since[ends]
    return Timeline(events, tuple(r.role.name for r in ranges), unit, num_lost)
