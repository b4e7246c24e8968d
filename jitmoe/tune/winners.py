"""What rows of sweeps prove: plans that beat the heuristic's, and the tuned file of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from jitmoe import tuned
from jitmoe.tune.trial import POINT

# Another kernel is to be compiled and loaded for a tuned plan: it must be worth it. Guess.
MIN_GAIN = 0.01
OCCASIONS = 2
CLOSE = 0.05  # from the best, of a heuristic that needs no correction


def point_of(row: dict) -> tuple:
    """Layer, GPU, token count and skew."""
    return tuple(row[name] for name in POINT)


def plan_of(row: dict) -> tuple:
    return tuple(row[name] for name in tuned.TUNABLE)


def noise_of(row: dict, heuristic: dict | None) -> float:
    """What a gain must exceed to count: the noise of its own pairs, that of the heuristic's plan
    measured beside itself in the same round, and what that seemed to gain; 1 % at least. Infinite
    where the heuristic was not measured so.
    """
    if heuristic is None or heuristic["status"] != "ok":
        return float("inf")
    return max(row["noise"], heuristic["noise"], abs(heuristic["gain"]), MIN_GAIN)


def is_ahead(row: dict, heuristic: dict | None) -> bool:
    """Whether a row beats the heuristic by more than the noise; `heuristic` is its row of that
    point and round.
    """
    return (
        row["status"] == "ok" and not row["is_heuristic"] and row["gain"] > noise_of(row, heuristic)
    )


def heuristics_of(rows: Iterable[dict]) -> dict[tuple, dict]:
    """The heuristic's rows by point and round."""
    return {(*point_of(row), row["round"]): row for row in rows if row["is_heuristic"]}


def best(rows: Iterable[dict], skew: str = "uniform") -> list[tuned.Entry]:
    """At most one plan for each GPU, layer and token range: the one that gains most of those that
    were ahead of the heuristic, by more than the noise, in each of two rounds or more at a point,
    and at no point of the range behind it by as much.

    Of several kernels of a plan, as after an update, the last one's rows count.
    """
    rows = [row for row in rows if row["skew"] == skew]
    found = []
    for some in _by_range(rows).values():
        proven = []
        for of_plan in _by_plan(some).values():
            if gains := _proof(of_plan, some):
                proven.append((sum(gains) / len(gains), of_plan))
        if proven:
            _, of_plan = max(proven, key=lambda item: item[0])
            found.append(_entry(of_plan))
    return found


def _by_range(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
    groups = defaultdict(list)
    for row in rows:
        layer = (row["gpu"], row["num_sms"], *(row[name] for name in tuned.LAYER))
        groups[*layer, row["first_tokens"], row["last_tokens"]].append(row)
    return groups


def _by_plan(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
    groups = defaultdict(list)
    for row in rows:
        if not row["is_heuristic"]:
            groups[plan_of(row)].append(row)
    return {
        plan: [row for row in some if row["kernel"] == some[-1]["kernel"]]
        for plan, some in groups.items()
    }


def _proof(of_plan: list[dict], rows: list[dict]) -> list[float]:
    """Gains of a plan where it was ahead; none if it is not proven."""
    heuristics, gains, points = heuristics_of(rows), [], defaultdict(int)
    for row in of_plan:
        heuristic = heuristics.get((*point_of(row), row["round"]))
        if row["status"] != "ok" or row["gain"] < -noise_of(row, heuristic):
            return []
        if is_ahead(row, heuristic):
            gains.append(row["gain"])
            points[point_of(row)] += 1
        elif row["round"] > 1:
            return []  # ahead before, not again
    is_everywhere = {point_of(row) for row in rows} == {point_of(row) for row in of_plan}
    return gains if is_everywhere and max(points.values(), default=0) >= OCCASIONS else []


def _entry(of_plan: list[dict]) -> tuned.Entry:
    last = of_plan[-1]
    return tuned.Entry(
        gpu=last["gpu"],
        num_sms=last["num_sms"],
        layer={name: last[name] for name in tuned.LAYER},
        tokens=(last["first_tokens"], last["last_tokens"]),
        plan={name: last[name] for name in tuned.TUNABLE},
        measured={
            "shape": last["shape"],
            "changes": last["changes"],
            "num_tokens": sorted({row["num_tokens"] for row in of_plan}),
            "us": last["us_median"],
            "heuristic_us": last["heuristic_us"],
            "gains": [row["gain"] for row in of_plan],
            **{name: last.get(name) for name in ("date", "driver", "versions", "commit")},
        },
    )


def save(rows: Iterable[dict], path: Path | str | None = None) -> Path:
    """Put `best(rows)` into a tuned file and return its path; other entries stay, but for those
    whose plan was measured in `rows` and is not proven (again).

    path  default: the site file, which every call on this site then looks into first

    The file is replaced whole. Calls of this process plan anew for weights made from now on. Raises
    ValueError if there is no place for a site file, TunedFileError for a file that is damaged,
    OSError.
    """
    rows = list(rows)
    path = place(path)
    winners = best(rows)
    replaced = {(entry.key, entry.tokens) for entry in winners}
    measured = {
        (row["gpu"], row["num_sms"], *(row[name] for name in (*tuned.LAYER, *tuned.TUNABLE)))
        for row in rows
        if row["skew"] == "uniform"
    }

    def merge(entries: list[tuned.Entry]) -> Iterator[tuned.Entry]:
        for entry in entries:
            plan = tuple(entry.plan[name] for name in tuned.TUNABLE)
            if (entry.key, entry.tokens) not in replaced and (*entry.key, *plan) not in measured:
                yield entry
        yield from winners

    tuned.write(path, merge)
    return path


def place(path: Path | str | None = None) -> Path:
    """The file that `save` would write. Raises as `save`, so that it can be known before a sweep;
    touches nothing.
    """
    path = tuned.site_file() if path is None else Path(path)
    if path is None:
        raise ValueError(
            "there is no place for a site file (JITMOE_TUNED=off, JITMOE_NO_CACHE or no home "
            "directory); set JITMOE_TUNED to a path, or pass one"
        )
    tuned.load_to_write(path)
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: {nearest} is not writable; take another")
    return path


def compare(rows: Iterable[dict]) -> list[dict]:
    """For each point the heuristic beside the best plan that ran: `gain` of the first round, in
    which the best was picked, `again` of the last, None if there was one round; and whether `best`
    keeps it.
    """
    rows = list(rows)
    kept = {(*entry.key, *entry.plan.values(), entry.tokens) for entry in best(rows)}
    points = defaultdict(list)
    for row in rows:
        if row["status"] == "ok":
            points[point_of(row)].append(row)
    found = []
    for some in points.values():
        first = [row for row in some if row["round"] == 1]
        if not first:
            continue
        top = max(first, key=lambda row: 0.0 if row["is_heuristic"] else row["gain"])
        again = [row for row in some if plan_of(row) == plan_of(top) and row["round"] > 1]
        key = (top["gpu"], top["num_sms"], *(top[name] for name in tuned.LAYER), *plan_of(top))
        found.append(
            {
                **{name: top[name] for name in ("shape", "format", "num_tokens", "skew")},
                "heuristic_us": top["heuristic_us"],
                "best_us": top["us_median"],
                "plan": top["changes"] or "the heuristic's",
                "gain": 0.0 if top["is_heuristic"] else top["gain"],
                "again": again[-1]["gain"] if again and not top["is_heuristic"] else None,
                "noise": top["noise"],
                "kept": (*key, (top["first_tokens"], top["last_tokens"])) in kept,
            }
        )
    return found


def table(rows: Iterable[dict]) -> str:
    """`compare` in Markdown, and how often the heuristic is close to the best."""
    points = compare(rows)
    lines = [
        "| layer | tokens | heuristic us | best us | gain | again | plan | kept |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for point in points:
        again = "" if point["again"] is None else f"{point['again']:+.1%}"
        name = point["shape"] + f" {point['format']}" * (point["format"] != "fp8_block")
        lines.append(
            f"| {name} | {point['num_tokens']:,} | {point['heuristic_us']:,.1f} | "
            f"{point['best_us']:,.1f} | {point['gain']:+.1%} | {again} | {point['plan']} | "
            f"{'yes' if point['kept'] else ''} |"
        )
    gains = [point["gain"] if point["again"] is None else point["again"] for point in points]
    close = sum(gain <= CLOSE for gain in gains)
    lines.append(
        f"\nThe heuristic's plan is within {CLOSE:.0%} of the best at {close} of {len(points)} "
        "points."
    )
    return "\n".join(lines)
