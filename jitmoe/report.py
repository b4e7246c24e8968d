"""What a plan decided, as plain data (`plan_report`) and as text for a terminal (`print_plan`)."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from rich.console import Console
from rich.text import Text

from jitmoe import links, tuned
from jitmoe.plan import heuristics, problem
from jitmoe.plan.formats import format_of
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.memory_map import MemoryMap
from jitmoe.plan.problem import MoeProblem

BLOCKS_PER_SM = 1  # the launch bounds of every room; the grid fills the GPU once


def plan_report(layer: MoeProblem, gpu: GpuSpec, **variant) -> dict:
    """Everything `jitmoe plan` prints, ready for JSON; `variant` is as in `heuristics.choose`.
    Raises PlanError if no plan fits.
    """
    plan, origin, tokens = tuned.choose(layer, gpu, **variant)
    floor = heuristics.floor(layer, gpu)
    return {
        "problem": asdict(layer),
        "gpu": asdict(gpu),
        "kernel": plan.name,
        "arch": plan.arch,
        "plan_from": "heuristic" if origin is None else str(origin),
        "bucket": plan.bucket,
        "bucket_tokens": tokens or _bucket_tokens(plan, layer),
        "plan": {field.name: getattr(plan, field.name) for field in fields(plan)},
        "num_stages": plan.num_stages,
        "grid": [gpu.num_sms, BLOCKS_PER_SM],
        "num_threads": plan.num_threads,
        "roles": _roles(plan),
        "smem": _regions(plan.smem),
        "smem_bytes": plan.smem.num_bytes,
        "smem_limit_bytes": gpu.smem_bytes,
        "workspace_bytes": plan.workspace_bytes(plan.num_ranks * layer.num_tokens),
        **(_ranks(plan, layer) if plan.num_ranks > 1 else {}),
        "tokens_per_active_expert": layer.tokens_per_active_expert,
        "floor_us": floor.us,
        "floor_memory_us": floor.memory_us,
        "floor_math_us": floor.math_us,
        "tflops": gpu.tflops(layer.format),
        "bound": floor.bound,
        "limits": limits(layer.format),
    }


def _ranks(plan: MegaMoePlan, layer: MoeProblem) -> dict:
    """Of a rank, where `layer` is its share of the experts, and its tokens at most."""
    replace(layer, num_tokens=plan.num_ranks * layer.num_tokens)  # refuses too many
    expected = links.expected_links(layer, plan.num_ranks)
    return {
        "symmetric_bytes": plan.symmetric(layer.num_tokens).num_bytes,
        "link_bytes": {
            name: round(num_bytes)
            for name, num_bytes in (vars(expected) | {"moved": expected.moved(plan.presum)}).items()
        },
    }


def limits(format: str = "fp8_block") -> dict[str, str]:
    """The sizes a layer of a number format may have, in words."""
    form = format_of(format)
    return {
        "num_tokens": f"0 to {problem.MAX_TOKENS:,}",
        "num_experts": f"1 to {problem.MAX_EXPERTS:,}",
        "top_k": f"1 to {problem.MAX_TOP_K}",
        "hidden": f"a multiple of {form.hidden_step} up to {problem.MAX_HIDDEN:,}",
        "intermediate": (
            f"a multiple of {form.intermediate_step} up to {problem.MAX_INTERMEDIATE:,}"
        ),
    }


def print_plan(console: Console, title: str, report: dict, note: str = "") -> None:
    """The report as text, with a model's note."""
    layer, gpu = report["problem"], report["gpu"]
    low, high = report["bucket_tokens"]
    is_tuned, absent = report["plan_from"] != "heuristic", tuned.absent_site_file()
    facts = {
        "layer": f"{title}: {layer['num_tokens']:,} tokens, hidden {layer['hidden']:,}, "
        f"intermediate {layer['intermediate']:,}, {layer['num_experts']} experts, "
        f"top_k {layer['top_k']}, in {layer['format']}{', no gate' * (not layer['gated'])}",
        "plan from": f"{'tuned, ' * is_tuned}{report['plan_from']}"
        + (f"; JITMOE_TUNED names {absent}, which is not there" if absent else ""),
        "bucket": f"{report['bucket']}, which serves {low:,} to {high:,} tokens of this layer "
        f"({report['tokens_per_active_expert']:.1f} a busy expert now)",
        "kernel": f"{report['kernel']} for {report['arch']}, "
        f"{report['num_threads']} threads a block",
        "grid": f"{gpu['num_sms']} x {BLOCKS_PER_SM}: {BLOCKS_PER_SM} block on every SM of the "
        f"{gpu['name']}",
        "stages": f"{report['num_stages']}",
        "shared memory": f"{report['smem_bytes']:,} of {report['smem_limit_bytes']:,} bytes",
        "workspace": f"{report['workspace_bytes']:,} bytes of device memory",
        "floor": f"{report['floor_us']:.1f} us, bound by {report['bound']}",
        "": f"(memory {report['floor_memory_us']:.1f} us at {gpu['read_gbps']:,.0f} GB/s, "
        f"math {report['floor_math_us']:.1f} us at {report['tflops']:,.0f} TFLOP/s; "
        f"rates {'measured' if gpu['measured'] else 'scaled from the data sheet'})",
    }
    if report["plan"]["num_ranks"] > 1:
        facts |= _rank_facts(report)
    if note:
        facts = {"layer": facts.pop("layer"), "note": note} | facts
    for name, text in facts.items():
        _print_row(console, name, f"{name:<14} {text}")
    _print_table(console, report["roles"])
    _print_table(console, report["smem"])
    console.print("\nlimits", style="bold")
    for name, text in report["limits"].items():
        console.print(f"{name:<14} {text}", soft_wrap=True)


def _rank_facts(report: dict) -> dict[str, str]:
    """What is else where ranks share the work."""
    num_ranks, presum = report["plan"]["num_ranks"], report["plan"]["presum"]
    sent = report["link_bytes"]
    return {
        "ranks": f"{num_ranks}, each with such a share of the experts and up to "
        f"{report['problem']['num_tokens']:,} tokens; kernel, memory and floor are of one",
        "symmetric": f"{report['symmetric_bytes']:,} bytes of device memory that all ranks address",
        "links": f"{sent['moved']:,} bytes leave a rank in a call, if routing is uniform: tokens "
        f"once, {'rows summed before' if presum else 'a row for each pair'}, and tables of "
        f"{sent['tables']:,}; pair by pair tokens and rows are {sent['pairs']:,}",
    }


def _print_row(console: Console, bold: str, line: str) -> None:
    text = Text(line)
    text.stylize("bold", 0, len(bold))
    console.print(text, soft_wrap=True)


def _print_table(console: Console, rows: list[dict]) -> None:
    """A line per row below the names of the columns; numbers to the right."""
    columns = [[name, *(row[name] for row in rows)] for name in rows[0]]
    cells = [[f"{c:,}" if isinstance(c, int) else c for c in column] for column in columns]
    aligns = [">" if isinstance(column[1], int) else "<" for column in columns]
    widths = [max(map(len, column)) for column in cells]
    console.print()
    for i, row in enumerate(zip(*cells, strict=True)):
        parts = (f"{c:{a}{w}}" for c, a, w in zip(row, aligns, widths, strict=True))
        line = "  ".join(parts).rstrip()
        _print_row(console, line if i == 0 else "", line)


def _bucket_tokens(plan: MegaMoePlan, layer: MoeProblem) -> tuple[int, int]:
    """The first and the last token count the bucket of `plan` serves."""
    if heuristics.has_one_bucket(plan.format, plan.batch_invariant, plan.num_ranks > 1):
        return 0, problem.MAX_TOKENS
    limit = heuristics.decode_limit(layer)
    return (0, limit) if plan.bucket == "decode" else (limit + 1, problem.MAX_TOKENS)


def _roles(plan: MegaMoePlan) -> list[dict]:
    rows, first = [], 0
    for role in plan.roles:
        last = first + role.num_warps - 1
        warps = f"{first}..{last}" if last > first else str(first)
        rows.append(
            {"role": role.name, "warps": warps, "registers": role.num_regs, "job": role.job}
        )
        first = last + 1
    return rows


def _regions(memory: MemoryMap) -> list[dict]:
    rows = []
    for region in memory.regions:
        count = region.shape[0] if len(region.shape) > 1 or region.ctype == "u64" else 1
        rows.append(
            {
                "region": region.name,
                "offset": memory.offsets[region.name],
                "bytes": region.num_bytes // count,
                "count": count,
                "use": region.note,
            }
        )
    return rows
