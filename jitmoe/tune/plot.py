"""Rows of sweeps, and traces, as pictures: each function returns a matplotlib Figure.

They raise ImportError without matplotlib, and ValueError for rows in which there is nothing to
draw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from jitmoe import tuned
from jitmoe.plan.gpu import GPUS, GpuSpec
from jitmoe.tracing.summary import Summary
from jitmoe.tune.winners import CLOSE, compare

# Differ for every kind of colour vision; the floor is where nothing can be below.
OURS, BEST, FLOOR = "#0072b2", "#d55e00", "#666666"
PEERS = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WAITS = ("#d55e00", "#f0b27a", "#cc79a7", "#e3c4d8", "#999999", "#d0d0d0", "#e69f00", "#7a5195")
MARKERS = "osD^vP*X"
PANEL = (5.0, 3.4)  # inches
COLUMNS = 2


def times(
    rows: Iterable[dict],
    peers: Mapping[str, Mapping[str, Mapping[int, float]]] | None = None,
):
    """Microseconds against tokens, a panel for each layer: the heuristic's plan, the best that was
    measured, the floor, and peers.

    peers  layer -> name -> tokens -> microseconds
    """
    rows = list(rows)
    points = _points(rows)
    figure, axes = _panels(points)
    floors = {(row["shape"], row["num_tokens"]): row["floor_us"] for row in rows if _is_ok(row)}
    for axis, (shape, some) in zip(axes, points.items(), strict=True):
        tokens = [point["num_tokens"] for point in some]
        lines = {
            "floor": (FLOOR, "--", [floors[shape, n] for n in tokens]),
            "heuristic": (OURS, "o-", [point["heuristic_us"] for point in some]),
            "best plan": (BEST, "x", [point["best_us"] for point in some]),
        }
        for name, (colour, style, us) in lines.items():
            axis.plot(tokens, us, style, color=colour, label=name, markersize=5, zorder=3)
        for i, (name, us) in enumerate((peers or {}).get(shape, {}).items()):
            colour = PEERS[i % len(PEERS)]
            axis.plot(us.keys(), us.values(), "s-", color=colour, label=name, markersize=3)
        _tokens_axis(axis, shape, tokens)
        axis.set(yscale="log", ylabel="microseconds")
        axis.yaxis.set_major_formatter("{x:,.0f}")
    _legend(figure, axes)
    return figure


def speedup(rows: Iterable[dict]):
    """What the best plan of each point gains over the heuristic's, in percent, with its noise; a
    filled mark is one that `best` keeps.
    """
    points = _points(list(rows))
    figure, axes = _panels(points)
    for axis, (shape, some) in zip(axes, points.items(), strict=True):
        tokens = [point["num_tokens"] for point in some]
        gains = [100 * point["gain"] for point in some]
        noise = [100 * point["noise"] for point in some]
        axis.errorbar(tokens, gains, noise, fmt="none", color=OURS, capsize=3)
        for n, gain, point in zip(tokens, gains, some, strict=True):
            axis.plot(n, gain, "o", color=OURS, markerfacecolor=OURS if point["kept"] else "white")
        axis.axhline(0, color=FLOOR, linewidth=0.8)
        axis.axhline(100 * CLOSE, color=BEST, linewidth=0.8, linestyle="--")
        axis.set(ylabel="gain over the heuristic, %")
        _tokens_axis(axis, shape, tokens)
    return figure


def roofline(rows: Iterable[dict], gpu: GpuSpec | None = None):
    """TFLOP/s against FLOP per byte of the heuristic's plan at each point, below the roofs of
    memory and math by the table's rates.

    gpu  default: that of the table with the rows' name
    """
    rows = [row for row in rows if row["is_heuristic"] and _is_ok(row) and row["round"] == 1]
    _check(rows)
    gpu = gpu or _gpu(rows[0]["gpu"])
    figure, (axis,) = _panels({"": rows}, width=6.0)
    for marker, (shape, some) in zip(MARKERS * len(rows), _by(rows, "shape").items(), strict=False):
        intensity = [1e3 * row["tflops"] / row["gbps"] for row in some]
        axis.plot(intensity, [row["tflops"] for row in some], marker, label=shape, alpha=0.8)
    low = min(1e3 * row["tflops"] / row["gbps"] for row in rows) / 2
    for format in dict.fromkeys(row["format"] for row in rows):
        peak = gpu.tflops(format)
        ridge = 1e3 * peak / gpu.read_gbps
        xs = [low, ridge, max(axis.get_xlim()[1], 3 * ridge)]
        ys = [gpu.read_gbps * 1e-3 * low, peak, peak]
        axis.plot(xs, ys, color=FLOOR, linestyle="--", label=f"roof, {format}")
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.set_title(f"{gpu.name}: {gpu.read_gbps:,.0f} GB/s", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    return figure


def candidates(rows: Iterable[dict], field: str):
    """What every candidate of the first round gains over the heuristic, in percent, coloured by a
    field of plans; a cross below is one that did not run or was wrong.
    """
    if field not in tuned.TUNABLE:
        raise ValueError(f"field must be one of {', '.join(tuned.TUNABLE)}, got {field!r}")
    rows = [row for row in rows if row["round"] == 1 and not row["is_heuristic"]]
    _check(rows)
    layers = _by(rows, "shape")
    figure, axes = _panels(layers)
    values = sorted({row[field] for row in rows})
    colours = {value: (OURS, BEST, *PEERS, FLOOR)[i % 7] for i, value in enumerate(values)}
    for axis, (shape, some) in zip(axes, layers.items(), strict=True):
        tokens = sorted({row["num_tokens"] for row in some})
        gains = [100 * row["gain"] for row in some if _is_ok(row)]
        bottom = min([*gains, 0.0]) - 2
        for i, value in enumerate(values):
            mine = [row for row in some if row[field] == value]
            shift = 0.12 * (i - (len(values) - 1) / 2)  # side by side
            for marker, wanted in (("o", True), ("x", False)):
                kept = [row for row in mine if _is_ok(row) == wanted]
                xs = [tokens.index(row["num_tokens"]) + shift for row in kept]
                ys = [100 * row["gain"] if wanted else bottom for row in kept]
                label = f"{field} {value}" if wanted else None
                axis.plot(xs, ys, marker, color=colours[value], label=label, alpha=0.7)
        axis.axhline(0, color=FLOOR, linewidth=0.8)
        axis.set_xticks(range(len(tokens)), [f"{n:,}" for n in tokens], rotation=45)
        axis.set(xlabel="tokens", ylabel="gain over the heuristic, %", yscale="symlog")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(shape, fontsize=10)
        axis.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def roles(summaries: Mapping[str, Summary]):
    """Traced launches side by side: for each role what its warps spend the launch on, in percent:
    work, and every wait that takes 1 % or more; what is left is idleness.

    summaries  title -> `Trace.summary()`
    """
    _check(list(summaries))
    figure, axes = _panels(summaries)
    waits = [name for one in summaries.values() for some in one.waits.values() for name in some]
    colours = {name: WAITS[i % len(WAITS)] for i, name in enumerate(dict.fromkeys(waits))}
    for axis, (title, one) in zip(axes, summaries.items(), strict=True):
        for y, (role, busy) in enumerate(one.busy.items()):
            axis.barh(y, 100 * busy, color=OURS, label="works")
            left = 100 * busy
            for name, time in sorted(one.waits[role].items(), key=lambda item: -item[1]):
                width = 100 * time / max(one.duration, 1)
                if width >= 1:
                    axis.barh(y, width, left=left, color=colours[name], label=f"waits: {name}")
                    left += width
        axis.set_yticks(range(len(one.busy)), one.busy)
        axis.invert_yaxis()
        axis.set(xlim=(0, 100), xlabel="% of the launch")
        axis.set_title(f"{title}: {one.duration:,} {one.unit}", fontsize=10)
    _legend(figure, axes)
    return figure


def _is_ok(row: dict) -> bool:
    return row["status"] == "ok"


def _check(rows: list) -> None:
    if not rows:
        raise ValueError("rows must hold a trial that was timed, got none; sweep first")


def _points(rows: list[dict]) -> dict[str, list[dict]]:
    """`compare` by layer, in the order of tokens."""
    points = sorted(compare(rows), key=lambda point: point["num_tokens"])
    _check(points)
    return _by(points, "shape")


def _by(rows: Iterable[dict], name: str) -> dict[str, list[dict]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row[name]].append(row)
    return dict(sorted(groups.items()))


def _gpu(name: str) -> GpuSpec:
    for spec in GPUS.values():
        if tuned.gpu_name(spec) == name:
            return spec
    raise ValueError(f"the table has no rates of {name}; pass gpu=jitmoe.plan.gpu.GpuSpec(...)")


def _panels(groups: Mapping, width: float = PANEL[0]):
    """A figure, and an axis for each group."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed; pip install 'jitmoe[notebook]'"
        ) from error
    columns = min(COLUMNS, len(groups))
    num_rows = -(-len(groups) // columns)
    figure = Figure(figsize=(width * columns, PANEL[1] * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, columns, squeeze=False).flatten()
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    return figure, axes[: len(groups)]


def _legend(figure, axes) -> None:
    """One for all panels, below them."""
    lines = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )


def _tokens_axis(axis, title: str, tokens: list[int]) -> None:
    axis.set(xscale="log", xlabel="tokens")
    axis.set_xticks(tokens, [f"{n:,}" for n in tokens], rotation=45)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=10)
