"""Draws examples/records/speed.svg: ours, the best peer and the floor against tokens, by shape.

    python examples/make_picture.py

Needs matplotlib: pip install 'jitmoe[bench]'. make_tables.py puts the picture into README.md.
"""

import sys
from pathlib import Path

from jitmoe.bench.records import Comparison, compare, load, published

RECORDS = Path(__file__).resolve().parent / "records"
LAYERS = {"S1": "DeepSeek-V3, EP8", "S2": "Qwen3-30B-A3B", "S3": "Mixtral-8x7B", "S4": "V4-Flash"}
# Blue and orange differ for every kind of colour vision; the floor is where nothing can be below.
LINES = {
    "jitmoe": {"color": "#0072b2", "marker": "o"},
    "best block-FP8 peer": {"color": "#d55e00", "marker": "s"},
    "floor": {"color": "#666666", "linestyle": "--"},
}


def series(points: list[Comparison]) -> dict[str, list[float]]:
    """Microseconds of each of LINES; ours as on the card that peers were measured on."""
    return {
        "jitmoe": [point.us * point.scale for point in points],
        "best block-FP8 peer": [point.best_us for point in points],
        "floor": [point.floor_us for point in points],
    }


def draw(comparisons: dict[str, list[Comparison]], path: Path) -> None:
    """A panel for each shape, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jitmoe", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(comparisons), figsize=(12, 3.2), layout="constrained")
    for axis, (shape, points) in zip(axes, comparisons.items(), strict=True):
        tokens = [point.num_tokens for point in points]
        for name, us in series(points).items():
            axis.plot(tokens, us, label=name, markersize=4, linewidth=1.5, **LINES[name])
        axis.set(xscale="log", yscale="log", xlabel="tokens", xticks=tokens, xticklabels=tokens)
        axis.set_title(f"{shape}: {LAYERS.get(shape, '')}")
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(axis="x", labelrotation=45)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds")
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def main() -> int:
    comparisons = compare(load(RECORDS), published(RECORDS)[-1])
    if not all(comparisons.values()):
        print("records lack a shape that peers have; run jitmoe bench --out", file=sys.stderr)
        return 1
    draw(comparisons, RECORDS / "speed.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
