"""Makes the figures of README.md from examples/records; figures are never typed.

    python examples/make_tables.py            rewrite the part between the figures marks
    python examples/make_tables.py --check    say whether it is up to date (exit 1 if not)

A line of a *.jsonl is one measured point. Of points that differ only in when they were measured the
latest counts. A *-peers.toml holds what others reach, transformers/*.jsonl what models do,
tune/*.jsonl what sweeps found.
"""

import json
import sys
from pathlib import Path

from jitmoe import tune
from jitmoe.bench.records import TABLE, Comparison, compare, latest, load, published
from jitmoe.tune import winners

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "examples" / "records"
PICTURE = "examples/records/speed.svg"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
NOTHING = "No measurement is recorded yet."


def flop(row: dict) -> int:
    """Of the pairs that were routed, where the row says; some slots may have been unused."""
    return (
        row.get("flop")
        or row["num_tokens"] * row["top_k"] * 6 * row["hidden"] * row["intermediate"]
    )


def number(value, form: str = "") -> str:
    """Three or four digits, as many as a measurement is worth."""
    if value is None:
        return ""
    if form:
        return format(value, form)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cells(row: dict) -> dict[str, str]:
    """Column name to text; empty where the record says nothing."""
    if row["bench"] == "build":
        return {
            "bucket": row["bucket"],
            "compile s": number(row["compile_s"]),
            "load from disk ms": number(row["load_s"] * 1e3),
            "spilled bytes": f"{row['spill_bytes']}",
            "shared memory bytes": f"{row['smem_bytes']:,}",
            "stages": f"{row['num_stages']}",
        }
    us, floor = row["us_median"], row.get("floor_us")
    low, high = row.get("us_p10"), row.get("us_p90")
    is_layer = row["bench"] == "mega_moe"
    out = {
        "tokens": f"{row['num_tokens']:,}",
        "us": f"**{number(us)}**",
        "p10 to p90": f"{number(low)} to {number(high)}" if low and high else "",
        "TFLOP/s": number(flop(row) / us * 1e-6) if is_layer and us else "",
        "floor us": number(floor),
        "floor / us": number(floor / us, ".2f") if floor and us else "",
        "relative error": number(row.get("rel_error"), ".2e"),
        "re-quantised": number(row.get("rel_error_requantized"), ".2e"),
        "host us": number(row.get("host_us")),
        "one rank us": number(row.get("one_rank_us")),
        "us / one rank": number(row.get("of_one_rank"), ".3f"),
        **links(row),
    }
    return out


def links(row: dict) -> dict[str, str]:
    """Megabytes that a rank sends, and the bytes in those of a token out and a row back a pair."""
    sent = row.get("link_bytes")
    if not sent:
        return {"MB sent": "", "of pairs": ""}
    share = sent["moved"] / sent["pairs"] if sent["pairs"] else None
    return {"MB sent": number(sent["moved"] * 1e-6), "of pairs": number(share, ".2f")}


def table(rows: list[dict], peers: dict[str, list[dict]] | None = None) -> str:
    """Rows of one method; of its peers, by name, a column of microseconds each."""
    first = rows[0]
    texts = [cells(row) for row in rows]
    for name, of_peer in (peers or {}).items():
        us = {row["num_tokens"]: row["us_median"] for row in of_peer}
        for row, text in zip(rows, texts, strict=True):
            text[f"{name} us"] = number(us.get(row["num_tokens"]))
    columns = [name for name in texts[0] if any(text[name] for text in texts)]
    is_many = first["num_ranks"] != 1
    ranks = f", {first['num_ranks']} ranks" if is_many else ""
    ranks += ", presum" if first["presum"] else ""
    ways = [first[name] for name in ("routing", "heat") if first[name] not in ("uniform", "cool")]
    name = first["bench"] if first["method"] == "jitmoe" else first["method"]
    return "\n".join(
        [
            f"#### {name} {first['format']}, {first['shape']}{ranks}, "
            f"{', '.join([first['mode'], *ways])}",
            "",
            f"{first['num_experts']} experts{' and tokens of each rank' * is_many}, hidden "
            f"{first['hidden']}, intermediate {first['intermediate']}, top_k {first['top_k']}; "
            f"{conditions(rows)}",
            "",
            *markdown(columns, texts),
        ]
    )


def markdown(columns: list[str], texts: list[dict[str, str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---:|' * len(columns)}",
        *(f"| {' | '.join(text[name] for name in columns)} |" for text in texts),
    ]


def comparison_table(shape: str, points: list[Comparison]) -> str:
    texts = [
        {
            "tokens": f"{point.num_tokens:,}",
            "us": f"**{number(point.us)}**",
            "best peer us": number(point.best_us),
            "best peer": point.best_peer,
            "us / best peer": number(point.of_best, ".2f"),
            "target us": number(point.target_us),
            "us / target": number(point.of_target, ".2f"),
            "floor us": number(point.floor_us),
            "floor / us": number(point.floor_us / point.us, ".2f"),
        }
        for point in points
    ]
    columns = [name for name in texts[0] if any(text[name] for text in texts)]
    return "\n".join([f"#### {shape} beside the best peer", "", *markdown(columns, texts)])


def comparisons(rows: list[dict], figures: dict, picture: bool) -> list[str]:
    """The tables of ours beside the best block-FP8 peer, with what was compared above them."""
    tables = [
        comparison_table(shape, points)
        for shape, points in compare(rows, figures).items()
        if points
    ]
    if not tables:
        return []
    scales = [p.scale for points in compare(rows, figures).values() for p in points]
    text = (
        f"Peers with block scales, on one {figures['gpu']}, driver {figures['driver']}, "
        f"{figures['date']}: {figures['method']}. Ratios are of our time times "
        f"{min(scales):.3f} to {max(scales):.3f}: the rates of our card in our run over theirs."
    )
    image = [f"![Microseconds by tokens: ours, the best peer, the floor]({PICTURE})"]
    return [text, *image * picture, *tables]


def conditions(rows: list[dict]) -> str:
    """Where, when and how the rows were measured."""
    last = rows[-1]
    parts = [last["gpu"]]
    if last.get("driver"):
        parts.append(f"driver {last['driver']}")
    for name, unit in (
        ("read_gbps", "GB/s read"),
        ("copy_gbps", "GB/s copied"),
        ("fp8_tflops", "FP8 TFLOP/s"),
    ):
        values = [row[name] for row in rows if row.get(name)]
        if values:
            low, high = number(min(values)), number(max(values))
            parts.append(f"{low if low == high else f'{low} to {high}'} {unit} in the same run")
    parts.append(" and ".join(sorted({row["date"][:10] for row in rows})))
    commands = sorted({row["command"] for row in rows})
    return ", ".join(parts) + "; " + ", ".join(f"`{command}`" for command in commands)


def tables(rows: list[dict]) -> list[str]:
    """One for each layer, format and way of calling: ours beside peers of the records."""
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for part in latest(rows).values():
        key = tuple(part[0][name] for name in TABLE if name != "method")
        groups.setdefault(key, {})[part[0]["method"]] = part
    made = []
    for by_method in groups.values():
        ours = by_method.pop("jitmoe", None)
        made += [table(ours, by_method)] if ours else map(table, by_method.values())
    return made


def models(folder: Path) -> list[dict]:
    """Rows of examples/08_transformers_speed.py, of the latest file."""
    paths = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in paths[-1:] for line in path.read_text().splitlines()]


def models_table(rows: list[dict]) -> str:
    """Tokens a second by model and phase, a column for each implementation of the experts."""
    points: dict[tuple, dict] = {}
    for row in rows:
        if "failed" in row:  # a model that could not be built
            continue
        point = tuple(row[name] for name in ("model", "format", "phase", "size"))
        points.setdefault(point, {})[row["experts"]] = row
    texts = []
    for (model, experts_format, phase, size), by in points.items():
        text = {"model": model, "experts": experts_format}
        text["what"] = (
            f"{phase}, {size:,} tokens" if phase == "prefill" else f"decode, batch {size}"
        )
        for name in ("batched_mm", "grouped_mm", "jitmoe"):
            text[name] = number(by.get(name, {}).get("tokens_per_s"), ",.0f")
        apart = [row["apart"] for name, row in by.items() if row.get("apart") and name != "jitmoe"]
        text["logits apart"] = number(max(apart, default=None), ".1e")
        texts.append(text)
    title = "#### Models of transformers, tokens a second, eager"
    return "\n".join([title, "", conditions(rows), "", *markdown(list(texts[0]), texts)])


def sweep(folder: Path) -> list[dict]:
    """Rows of the latest sweep."""
    return [row for path in sorted(folder.glob("*.jsonl"))[-1:] for row in tune.load(path)]


def sweep_table(rows: list[dict]) -> str:
    title = "#### Sweep: the heuristic's plan beside the best"
    return "\n".join([title, "", conditions(rows), "", winners.table(rows)])


def figures(
    rows: list[dict],
    peers: list[dict],
    picture: bool,
    of_models: list[dict] = (),
    of_sweep: list[dict] = (),
) -> str:
    parts = comparisons(rows, peers[-1], picture) if peers else []
    parts += [sweep_table(of_sweep)] if of_sweep else []
    parts += [models_table(of_models)] if of_models else []
    parts += tables(rows)
    return "\n\n".join(parts) if parts else NOTHING


def updated(
    readme: str, rows: list[dict], peers=(), picture=False, of_models=(), of_sweep=()
) -> str:
    """`readme` with its figures made anew: from rows, the published figures of peers, with the
    picture if there is one, and rows of models and of a sweep. Raises ValueError if it lacks the
    marks.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must hold {BEGIN} and, after it, {END}")
    return (
        f"{before}{BEGIN}\n\n{figures(rows, peers, picture, of_models, of_sweep)}\n\n{END}{after}"
    )


def main(args: list[str]) -> int:
    if args not in ([], ["--check"]):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    try:
        is_drawn, of_models = (ROOT / PICTURE).is_file(), models(RECORDS / "transformers")
        of_sweep = sweep(RECORDS / "tune")
        new = updated(old, load(RECORDS), published(RECORDS), is_drawn, of_models, of_sweep)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if args and new != old:
        print("the figures of README.md are out of date: run examples/make_tables.py")
        return 1
    if not args:
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
