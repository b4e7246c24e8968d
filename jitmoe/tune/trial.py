"""One candidate at one point: what is asked of a measurer, and the row that becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jitmoe import tuned
from jitmoe.bench.points import SHAPES
from jitmoe.jit import cache, nvrtc
from jitmoe.jit.build import Built
from jitmoe.jit.render import render
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.models import MODELS
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import Variant
from jitmoe.tune.space import Candidate

# What a measurer gives; None where a trial was not timed.
MEASURED = (
    "us_median",
    "us_min",
    "us_p90",
    "heuristic_us",
    "gain",
    "noise",
    "tflops",
    "gbps",
    "floor_us",
    "bound",
    "of_floor",
    "rel_error",
    "rel_error_requantized",
)


@dataclass(frozen=True)
class Trial:
    """A candidate, to be measured beside the heuristic's plan.

    problem  with the token count
    skew     one of `reference.ROUTINGS`
    round    from 1: each has other random numbers, and a process of its own
    """

    problem: MoeProblem
    variant: Variant
    skew: str
    gpu: GpuSpec
    candidate: Candidate
    heuristic: MegaMoePlan
    round: int = 1

    @property
    def plan(self) -> MegaMoePlan:
        return self.candidate.plan

    @property
    def layer(self) -> MoeProblem:
        return replace(self.problem, num_tokens=0)

    @cached_property
    def identity(self) -> dict:
        """Fields of the row that tell it from all others; `kernel` is the name in the cache, by
        source and compiler.
        """
        source = render(self.plan)
        return {
            "gpu": tuned.gpu_name(self.gpu),
            "num_sms": self.gpu.num_sms,
            **tuned.layer_fields(self.plan),
            "num_tokens": self.problem.num_tokens,
            "skew": self.skew,
            **tuned.plan_fields(self.plan),
            "round": self.round,
            "kernel": cache.key(source, self.plan.arch, nvrtc.version(), nvrtc.options()),
        }

    @property
    def key(self) -> tuple:
        return tuple(self.identity.values())


KEY = (*("gpu", "num_sms", *tuned.LAYER, "num_tokens", "skew", *tuned.TUNABLE, "round", "kernel"),)
# What all candidates and rounds of a point share.
POINT = ("gpu", "num_sms", *tuned.LAYER, "num_tokens", "skew")


def key_of(row: dict) -> tuple:
    """`Trial.key` of a row."""
    return tuple(row[name] for name in KEY)


def row_of(trial: Trial, outcome: dict, built: Built | None, facts: dict) -> dict:
    """Ready for JSON and pandas.

    outcome  status, reason and what of `MEASURED` there is
    built    None if there is no kernel
    facts    conditions
    """
    first, last = heuristics.token_range(trial.problem)
    used = built.cubin.resources if built is not None else None
    return {
        "bench": "tune",
        "shape": layer_name(trial.problem),
        **trial.identity,
        "first_tokens": first,
        "last_tokens": last,
        "is_heuristic": trial.plan == trial.heuristic,
        "changes": trial.candidate.changes,
        "status": outcome["status"],
        "reason": outcome.get("reason"),
        **{name: outcome.get(name) for name in MEASURED},
        "smem_bytes": trial.plan.smem.num_bytes,
        "num_regs": used and used.num_regs,
        "spill_bytes": used and used.spill_store_bytes + used.spill_load_bytes,
        "compile_s": built and round(built.cubin.seconds, 2),
        **facts,
    }


def layer_name(problem: MoeProblem) -> str:
    """S1 to S4 or a preset's name, by its sizes; else the sizes."""
    sizes = (problem.hidden, problem.intermediate, problem.num_experts, problem.top_k)
    named = {name: shape for name, shape in [*MODELS.items(), *SHAPES.items()]}
    for name, shape in reversed(named.items()):
        if sizes == (shape.hidden, shape.intermediate, shape.num_experts, shape.top_k):
            return name
    return "{}x{} {}/{}".format(*sizes[:2], sizes[3], sizes[2])
