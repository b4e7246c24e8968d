"""A traced launch as a picture: one block by warp, and the math warps of every block."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jitmoe.tracing.events import CODES, Timeline, is_wait, task_fields

# Work from the outside in: what is inside is drawn over it.
_WORK = {
    "head": "#8c6bb1",
    "GEMM 1": "#c6dbef",
    "GEMM 2": "#fdd0a2",
    "GEMM 1 mma": "#2171b5",
    "GEMM 2 mma": "#e6550d",
    "epilogue": "#31a354",
    "combine": "#006d2c",
}
_WAITS = {
    "wait stage full": "#cb181d",
    "wait stage empty": "#969696",
    "wait task full": "#fb6a4a",
    "wait task empty": "#d9d9d9",
    "wait grid barrier": "#54278f",
    "wait head": "#df65b0",
    "wait mid": "#e7298a",
    "wait tile stored": "#bdbdbd",
    "wait list full": "#fcae91",
}

NEEDS_MATPLOTLIB = "plots need matplotlib, which is not installed; pip install 'jitmoe[trace]'"


def draw(timeline: Timeline, path: Path | str, block: int = 0) -> None:
    """Write a PNG: every warp of `block`, working above and waiting below, and of every block the
    first math warp.

    Raises ImportError without matplotlib, ValueError for a block that is not in the trace, OSError.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(NEEDS_MATPLOTLIB) from error
    events = timeline.events
    blocks = np.unique(events["block"])
    if block not in blocks:
        raise ValueError(
            f"block must be one of the {len(blocks)} of the trace, {blocks.min()} to "
            f"{blocks.max()}, got {block}"
        )
    scale, unit = (1e-3, "us") if timeline.unit == "ns" else (1.0, timeline.unit)
    height = min(2 + 0.075 * len(blocks), 14)
    figure = Figure(figsize=(18, 8 + height), layout="constrained")
    one, every = figure.subplots(2, 1, height_ratios=(7, height), sharex=True)

    of_block = events[events["block"] == block]
    warps = np.unique(of_block["warp"])
    for row, warp in enumerate(warps):
        mine = of_block[of_block["warp"] == warp]
        _bars(one, mine[~is_wait(mine)], row - 0.42, 0.5, _WORK, scale)
        _bars(one, mine[is_wait(mine)], row - 0.42, 0.5, dict.fromkeys(_WAITS, "white"), scale)
        _bars(one, mine[is_wait(mine)], row + 0.1, 0.32, _WAITS, scale)
    roles = {w: timeline.roles[r] for w, r in of_block[["warp", "role"]].tolist()}
    one.set_yticks(range(len(warps)), [f"{roles[w]} {w}" for w in warps])
    one.set_title(f"block {block}: each warp working (upper bar) and waiting (lower bar)")

    math = timeline.select(role="math")
    math = math[math["warp"] == math["warp"].min(initial=255)]
    for row, number in enumerate(blocks):
        mine = math[math["block"] == number]
        _bars(every, mine[~is_wait(mine)], row - 0.5, 1.0, _WORK, scale)
        _bars(every, mine[is_wait(mine)], row - 0.5, 1.0, _WAITS, scale)
    ticks = range(0, len(blocks), max(1, len(blocks) // 12))
    every.set_yticks(ticks, [str(blocks[t]) for t in ticks])
    every.set_title("every block: its first math warp, waits over work")
    every.set_ylabel("block")
    every.set_xlabel(unit)
    for axes in (one, every):
        axes.invert_yaxis()
        axes.margins(x=0.005, y=0.01)
        axes.xaxis.set_major_formatter("{x:,.10g}")
    patches = [Patch(color=color, label=name) for name, color in (_WORK | _WAITS).items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=7)
    figure.savefig(path, dpi=120, format="png")


def _bars(axes, events: np.ndarray, low: float, height: float, colors: dict, scale: float) -> None:
    """Events as bars from `low` up, those of one color at a time, inner ones last."""
    task, mma = events["event"] == CODES["task"], events["event"] == CODES["mma"]
    phase = np.where(task, task_fields(events["payload"])["phase"], events["payload"])
    for name, color in colors.items():
        base = name.removesuffix(" mma")
        if base in ("GEMM 1", "GEMM 2"):
            chosen = (task if base == name else mma) & (phase == (base == "GEMM 2"))
        else:
            chosen = events["event"] == CODES[name]
        begin, end = events["begin_ns"][chosen] * scale, events["end_ns"][chosen] * scale
        if len(begin):
            spans = np.stack([begin, end - begin], axis=1)
            axes.broken_barh(spans, (low, height), facecolor=color, linewidth=0)
