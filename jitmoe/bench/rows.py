"""A row of a record: one method at one point, ready for JSON; and as a line of text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitmoe.bench.ceilings import Ceilings
from jitmoe.bench.times import Times
from jitmoe.bench.trial import Result
from jitmoe.bench.work import Work
from jitmoe.peers.peer import Peer
from jitmoe.plan.heuristics import bucket
from jitmoe.plan.problem import MoeProblem


@dataclass(frozen=True)
class Rates:
    """What floors are made of: GB/s read and TFLOP/s of the layer's format."""

    read_gbps: float
    tflops: float


@dataclass(frozen=True)
class Point:
    """One layer, token count and routing, and the work of its calls."""

    shape: str
    layer: MoeProblem
    routing: str
    work: Work
    num_weight_sets: int
    is_cold: bool  # the weights that a graph reads exceed the L2 cache
    activation: str = "swiglu"  # its kind
    num_ranks: int = 1  # if more, the layer is a rank's, and work that of all ranks
    plan_from: str = "heuristic"  # or a tuned file: site or shipped


def rows_of(
    point: Point, method: Peer, result: Result, rates: Rates, ceilings: dict[str, Ceilings]
) -> list[dict]:
    """A row for each heat that was timed, or one for a method that was not.

    rates     of the GPU's table, the same for every card of its kind
    ceilings  of this run, by heat
    """
    layer, work = point.layer, point.work
    floor = work.floor(rates.read_gbps, rates.tflops)
    exact, requantized, worst = result.errors or (None, None, None)
    common = {
        "bench": "mega_moe",
        "mode": "graph",
        "format": layer.format,
        "shape": point.shape,
        "num_ranks": point.num_ranks,
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "activation": point.activation,
        "num_tokens": layer.num_tokens,
        "bucket": bucket(layer),
        "plan_from": point.plan_from,
        "routing": point.routing,
        "num_pairs": work.num_pairs,
        "num_active_experts": work.num_active,
        "num_bytes": round(work.num_bytes),
        "flop": round(work.flop),
        "num_weight_sets": point.num_weight_sets,
        "is_cold": point.is_cold,
        "method": method.name,
        "is_block_fp8": method.is_block_fp8,
        "status": result.status,
        "reason": result.reason,
        "rel_error": significant(exact, 4),
        "rel_error_requantized": significant(requantized, 4),
        "worst_element": significant(worst, 4),
        "host_us": significant(result.host_us, 3),
        "floor_us": round(floor.us, 2),
        "bound": floor.bound,
    }
    return [
        common | _timed(heat, times, point, rates, floor.us, ceilings[heat])
        for heat, times in (result.times or {next(iter(ceilings)): None}).items()
    ]


def _timed(heat: str, times: Times | None, point: Point, rates: Rates, floor_us, ceilings) -> dict:
    work = point.work
    tflops = ceilings.tflops(point.layer.format) or rates.tflops
    run_floor = work.floor(ceilings.read_gbps, tflops)
    row = {
        "heat": heat,
        "us_median": None,
        "us_p10": None,
        "us_p90": None,
        "gbps": None,
        "tflops": None,
        "of_floor": None,
        "of_run_floor": None,
        "run_floor_us": round(run_floor.us, 2),
        "read_gbps": round(ceilings.read_gbps),
        "copy_gbps": round(ceilings.copy_gbps),
        "fp8_tflops": significant(ceilings.fp8_tflops, 4),
        "fp8_fast_tflops": significant(ceilings.fp8_fast_tflops, 4),
        "bf16_tflops": significant(ceilings.bf16_tflops, 4),
        "fp8_skipped": ceilings.skipped,
    }
    if times is not None:
        row |= {
            "us_median": round(times.median, 2),
            "us_p10": round(times.p10, 2),
            "us_p90": round(times.p90, 2),
            "gbps": round(work.num_bytes / times.median * 1e-3),
            "tflops": round(work.flop / times.median * 1e-6, 1),
            "of_floor": round(floor_us / times.median, 3),
            "of_run_floor": round(run_floor.us / times.median, 3),
        }
    return row


def significant(value: float | None, digits: int) -> float | None:
    """Rounded to that many digits; None for what JSON has no number for."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


HEADER = (
    f"{'tokens':>6} {'heat':<4} {'us':>8} {'p10':>8} {'p90':>8} {'GB/s':>6} "
    f"{'TFLOP/s':>8} {'of floor':>8} {'of run':>7} {'error':>8} {'host us':>7}  layer: method"
)


def line(row: dict) -> str:
    """A row below HEADER."""
    start = f"{row['num_tokens']:>6} {row['heat']:<4} "
    name = f"{row['shape']}: {row['method']}"
    if row["status"] != "ok":
        error = f" (relative error {row['rel_error']:.2e})" if row["rel_error"] else ""
        return f"{start}{row['status'].upper()} {name}: {row['reason']}{error}"
    warm = "" if row["is_cold"] else "  weights in L2"
    return (
        f"{start}{row['us_median']:>8.1f} {row['us_p10']:>8.1f} {row['us_p90']:>8.1f} "
        f"{row['gbps']:>6} {row['tflops']:>8.1f} "
        f"{row['of_floor']:>8.0%} {row['of_run_floor']:>7.0%} {row['rel_error']:>8.2e} "
        f"{row['host_us']:>7.1f}  {name}{warm}{_ranks(row)}"
    )


def _ranks(row: dict) -> str:
    """A second line, of many ranks."""
    if row["num_ranks"] == 1:
        return ""
    mb = {name: f"{num_bytes * 1e-6:.3g}" for name, num_bytes in row["link_bytes"].items()}
    ratio = row["of_one_rank"]
    beside = f"{ratio:.3f} of one rank's time; " if ratio else ""
    return (
        f"\n{'':>6} {row['num_ranks']} ranks{', presum' * row['presum']}: {beside}MB that "
        f"each sends: {mb['moved']} (pairs {mb['pairs']}, tokens once {mb['once']}, presummed "
        f"{mb['presum']}, tables {mb['tables']})"
    )
