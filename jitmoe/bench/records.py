"""Records read back: rows of `jitmoe bench`, and published figures of peers to compare them with.

A record is a folder's *.jsonl; published figures are its *-peers.toml.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

# A table has one GPU, one layer, one way of calling; its rows are token counts.
TABLE = (
    "bench",
    "format",
    "shape",
    "hidden",
    "intermediate",
    "num_experts",
    "top_k",
    "activation",
    "num_ranks",
    "mode",
    "routing",
    "heat",
    "method",
    "gpu",
    "presum",
)
DEFAULTS = {
    "activation": "swiglu",
    "routing": "uniform",
    "heat": "cool",
    "method": "jitmoe",
    "presum": False,
    "status": "ok",
}
REQUIRED = (*TABLE, "num_tokens", "us_median", "date", "command")


def load(folder: Path) -> list[dict]:
    """Every row, in the order of files and lines. Raises ValueError naming file and line."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = DEFAULTS | json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path.name}:{number}: not JSON: {error}") from None
            missing = [name for name in REQUIRED if name not in row]
            if missing:
                raise ValueError(f"{path.name}:{number}: lacks {', '.join(missing)}")
            rows.append(row)
    return rows


def latest(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Timed rows by table, sorted by token count, the latest of those that differ in date only."""
    newest: dict[tuple, dict] = {}
    for row in sorted(rows, key=lambda row: row["date"]):  # stable: a later line wins on a tie
        if row["status"] == "ok":
            newest[tuple(row[name] for name in (*TABLE, "num_tokens"))] = row
    tables: dict[tuple, list[dict]] = {}
    for row in sorted(newest.values(), key=lambda row: row["num_tokens"]):
        tables.setdefault(tuple(row[name] for name in TABLE), []).append(row)
    return dict(sorted(tables.items(), key=lambda item: list(map(str, item[0]))))


def published(folder: Path) -> list[dict]:
    """Figures of peers, the latest file last; see examples/records for the fields."""
    paths = sorted(folder.glob("*-peers.toml"))
    return [tomllib.loads(path.read_text(encoding="utf-8")) for path in paths]


@dataclass(frozen=True)
class Comparison:
    """One point of ours beside the best block-FP8 peer; microseconds.

    scale         what our time is multiplied by to be compared: ceilings of our run over those of
                  the card that the peer was measured on
    target        None where none is set
    """

    shape: str
    num_tokens: int
    us: float
    scale: float
    best_peer: str
    best_us: float
    floor_us: float
    target_us: float | None

    @property
    def of_best(self) -> float:
        return self.us * self.scale / self.best_us

    @property
    def of_target(self) -> float | None:
        return self.us * self.scale / self.target_us if self.target_us else None


def compare(rows: list[dict], figures: dict) -> dict[str, list[Comparison]]:
    """Shape -> points that ours and `figures` (one of `published`) have in common.

    Ours is the latest on that GPU with uniform routing, cool. A peer measured in a record counts
    where it is faster than the published one.
    """
    wanted = {
        "format": "fp8_block",
        "activation": "swiglu",
        "routing": "uniform",
        "heat": "cool",
        "mode": "graph",
        "num_ranks": 1,
        "gpu": figures["gpu"],
    }
    mine, measured = {}, {}
    for table in latest(rows).values():
        if any(table[0][name] != value for name, value in wanted.items()):
            continue
        for row in table:
            point = row["shape"], row["num_tokens"]
            if row["method"] == "jitmoe":
                mine[point] = row
            elif row.get("is_block_fp8"):
                measured.setdefault(point, {})[row["method"]] = row
    return {
        shape: [
            _comparison(mine[shape, num_tokens], column, part, figures["ceilings"], measured)
            for column, num_tokens in enumerate(figures["tokens"])
            if (shape, num_tokens) in mine
        ]
        for shape, part in figures["shapes"].items()
    }


def _comparison(row: dict, column: int, part: dict, roof: dict, measured: dict) -> Comparison:
    scale = _scale(row, roof)
    peers = {name: us[column] for name, us in part["block_fp8"].items()}
    for name, peer in measured.get((row["shape"], row["num_tokens"]), {}).items():
        peers[f"{name}, measured here"] = peer["us_median"] * _scale(peer, roof)
    best = min((name for name in peers if not math.isnan(peers[name])), key=peers.__getitem__)
    target = part["target"][column] if "target" in part else None
    point = (row["shape"], row["num_tokens"], row["us_median"], scale)
    return Comparison(*point, best, peers[best], row["floor_us"], target)


def _scale(row: dict, roof: dict) -> float:
    """By the read rate where memory bounds the point, else by the FP8 rate, if it was measured.

    Nearly all bytes are weights, which are read. Cards differ in read and copy rate apart from each
    other: 4,628 and 4,243 GB/s on one, 4,427 and 4,274 on the next, and 8 tokens of S1 took 3.4 %
    longer there (H200, 2026-11-30).
    """
    flop = row["num_tokens"] * row["top_k"] * 6 * row["hidden"] * row["intermediate"]
    is_math_bound = flop / roof["fp8_tflops"] * 1e-6 > 0.9 * row["floor_us"]
    name = "fp8_tflops" if is_math_bound else "read_gbps"
    return row[name] / roof[name] if row.get(name) else 1.0
