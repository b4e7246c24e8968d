"""Makes the figures of README.md from examples/records/*.jsonl; figures are never typed.

    python examples/make_tables.py            rewrite the part between the figures marks
    python examples/make_tables.py --check    say whether it is up to date (exit 1 if not)

A line of a record is one measured point. Of points that differ only in when they were measured the
latest counts.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
NOTHING = "No measurement is recorded yet."

# A table has one GPU, one layer, one way of calling; its rows are token counts.
TABLE = (
    "bench",
    "format",
    "shape",
    "hidden",
    "intermediate",
    "num_experts",
    "top_k",
    "num_ranks",
    "mode",
    "gpu",
)
REQUIRED = (*TABLE, "num_tokens", "us_median", "date", "command")


def load(folder: Path) -> list[dict]:
    """Every record, in the order of files and lines. Raises ValueError naming file and line."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path.name}:{number}: not JSON: {error}") from None
            missing = [name for name in REQUIRED if name not in row]
            if missing:
                raise ValueError(f"{path.name}:{number}: lacks {', '.join(missing)}")
            rows.append(row)
    return rows


def latest(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Rows by table, sorted by token count, one for each."""
    newest: dict[tuple, dict] = {}
    for row in sorted(rows, key=lambda row: row["date"]):  # stable: a later line wins on a tie
        newest[tuple(row[name] for name in (*TABLE, "num_tokens"))] = row
    tables: dict[tuple, list[dict]] = {}
    for row in sorted(newest.values(), key=lambda row: row["num_tokens"]):
        tables.setdefault(tuple(row[name] for name in TABLE), []).append(row)
    return dict(sorted(tables.items(), key=lambda item: list(map(str, item[0]))))


def flop(row: dict) -> int:
    return row["num_tokens"] * row["top_k"] * 6 * row["hidden"] * row["intermediate"]


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
    }
    peers = {name: peer for name, peer in (row.get("peers") or {}).items() if peer}
    out |= {name: number(peer) for name, peer in peers.items()}
    out["us / best peer"] = number(us / min(peers.values()), ".2f") if peers else ""
    return out


def table(rows: list[dict]) -> str:
    first = rows[0]
    texts = [cells(row) for row in rows]
    own = [name for name in texts[0] if name not in (first.get("peers") or {})]
    peers = sorted({name for row in rows for name in (row.get("peers") or {})})
    columns = [*own[:-1], *peers, own[-1]]
    columns = [name for name in columns if any(text.get(name) for text in texts)]
    ranks = f", {first['num_ranks']} ranks" if first["num_ranks"] != 1 else ""
    lines = [
        f"#### {first['bench']} {first['format']}, {first['shape']}{ranks}, {first['mode']}",
        "",
        f"{first['num_experts']} experts, hidden {first['hidden']}, intermediate "
        f"{first['intermediate']}, top_k {first['top_k']}; {conditions(rows)}",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---:|' * len(columns)}",
    ]
    lines += [f"| {' | '.join(text.get(name, '') for name in columns)} |" for text in texts]
    return "\n".join(lines)


def conditions(rows: list[dict]) -> str:
    """Where, when and how the rows were measured."""
    last = rows[-1]
    parts = [last["gpu"]]
    if last.get("driver"):
        parts.append(f"driver {last['driver']}")
    for name, unit in (("copy_gbps", "GB/s copied"), ("fp8_tflops", "FP8 TFLOP/s")):
        values = [row[name] for row in rows if row.get(name)]
        if values:
            low, high = number(min(values)), number(max(values))
            parts.append(f"{low if low == high else f'{low} to {high}'} {unit} in the same run")
    parts.append(" and ".join(sorted({row["date"][:10] for row in rows})))
    commands = sorted({row["command"] for row in rows})
    return ", ".join(parts) + "; " + ", ".join(f"`{command}`" for command in commands)


def figures(rows: list[dict]) -> str:
    tables = [table(part) for part in latest(rows).values()]
    return "\n\n".join(tables) if tables else NOTHING


def updated(readme: str, rows: list[dict]) -> str:
    """`readme` with its figures made anew. Raises ValueError if it lacks the marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must hold {BEGIN} and, after it, {END}")
    return f"{before}{BEGIN}\n\n{figures(rows)}\n\n{END}{after}"


def main(args: list[str]) -> int:
    if args not in ([], ["--check"]):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    try:
        new = updated(old, load(ROOT / "examples" / "records"))
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
