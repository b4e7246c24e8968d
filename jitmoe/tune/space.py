"""Which plans a sweep tries beside the heuristic's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from operator import index

from jitmoe import tuned
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MoeProblem


def _one_at_a_time(**fields: tuple) -> tuple[dict, ...]:
    return tuple({name: value} for name, values in fields.items() for value in values)


# Changes to the heuristic's plan, by its bucket; what does not fit is pruned.
DEFAULT = {
    "decode": (
        *_one_at_a_time(num_stages=(3, 4, 5, 6), num_task_slots=(2, 3, 4), unroll_k=(1, 2)),
        *_one_at_a_time(num_local_pairs=(512, 2048, 4096)),
        {"num_stages": 6, "num_local_pairs": 512},
        {"num_stages": 4, "num_task_slots": 3},
        {"producer_regs": 88, "math_regs": 168},
    ),
    "prefill": (
        *_one_at_a_time(num_stages=(3, 4), num_task_slots=(2, 3, 4), unroll_k=(1, 2, 4, 8)),
        *_one_at_a_time(extra_tokens=(0, 8, 16)),
        {"num_stages": 3, "num_task_slots": 4},
        {"producer_regs": 40, "math_regs": 232},
    ),
}
MX_DEFAULT = {
    "decode": (
        *_one_at_a_time(num_stages=(4, 6, 8, 9), num_task_slots=(2, 3, 4)),
        *_one_at_a_time(num_local_pairs=(512, 2048, 4096)),
    ),
    "prefill": (
        *_one_at_a_time(num_stages=(2, 3, 4), num_packed_stages=(2, 3, 4), unroll_k=(1, 2)),
        *_one_at_a_time(num_task_slots=(2, 3, 4), extra_tokens=(0, 8, 16)),
    ),
}


@dataclass(frozen=True)
class Candidate:
    """A plan, and in words what it has else than the heuristic's ("" for that one)."""

    plan: MegaMoePlan
    changes: str


def candidates(
    problem: MoeProblem,
    gpu: GpuSpec,
    space: Mapping[str, Iterable] | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    **variant,
) -> list[Candidate]:
    """The heuristic's plan, the tuned one if there is one, then those of `space` that
    `tuned.checked` lets pass; no plan twice.

    space    None: the other bucket's plan, and the changes `DEFAULT`. Else field
             of `tuned.TUNABLE` -> values: every combination, beside the heuristic's other fields
             for the bucket
    say      gets a sentence if no plan of `space` can run
    variant  as in `heuristics.choose`

    Raises ValueError for a field or a value that is no such, and PlanError if no plan fits.
    """
    chosen = heuristics.choose(problem, gpu, **variant)
    by_bucket = heuristics.plans_of_model(problem, gpu, **variant)
    tried = _changed(chosen, by_bucket) if space is None else _grid(chosen, by_bucket, space)
    fit, refused = [], []
    for plan in tried:
        try:
            fit.append(tuned.checked(plan, gpu))
        except PlanError as error:
            refused.append(error)
    if refused and not fit:
        say(
            f"none of the {len(refused)} plans of the space can run for {problem.num_tokens:,} "
            f"tokens of hidden {problem.hidden:,}; the first: {refused[0]}"
        )
    found = [chosen, tuned.choose(problem, gpu, **variant).plan, *fit]
    return [Candidate(plan, _changes(plan, chosen)) for plan in dict.fromkeys(found)]


def _changed(chosen: MegaMoePlan, by_bucket: Mapping[str, MegaMoePlan]) -> Iterator[MegaMoePlan]:
    yield from (plan for plan in by_bucket.values() if plan.bucket != chosen.bucket)
    for changes in (MX_DEFAULT if chosen.is_mx else DEFAULT)[chosen.bucket]:
        yield replace(chosen, **changes)


def _grid(
    chosen: MegaMoePlan, by_bucket: Mapping[str, MegaMoePlan], space: Mapping[str, Iterable]
) -> Iterator[MegaMoePlan]:
    values = _values(space)
    for bucket in values.pop("bucket", [chosen.bucket]):
        if bucket not in ("decode", "prefill"):
            raise ValueError(f"bucket must be decode or prefill, got {bucket!r}; take one of them")
        for combination in product(*values.values()) if bucket in by_bucket else ():
            yield replace(by_bucket[bucket], **dict(zip(values, combination, strict=True)))


def _values(space: Mapping[str, Iterable]) -> dict[str, list]:
    """Raises ValueError for what is no space."""
    if not isinstance(space, Mapping):
        raise ValueError(f"space must be a mapping of plan fields to values, got {space!r}")
    if unknown := [str(name) for name in space if name not in tuned.TUNABLE]:
        raise ValueError(
            f"space must have fields of {', '.join(tuned.TUNABLE)}, got {', '.join(unknown)}; "
            "what says which layer it is goes into the problem"
        )
    values = {}
    for name, some in space.items():
        try:
            if isinstance(some, str):
                raise TypeError
            values[name] = list(some) if name == "bucket" else [index(value) for value in some]
        except TypeError:
            kind = "buckets" if name == "bucket" else "whole numbers"
            raise ValueError(f"{name} of space must be a list of {kind}, got {some!r}") from None
    return values


def _changes(plan: MegaMoePlan, chosen: MegaMoePlan) -> str:
    """Of another bucket the bucket alone: nearly all fields differ then."""
    if plan.bucket != chosen.bucket:
        return f"bucket={plan.bucket}"
    before, after = tuned.plan_fields(chosen), tuned.plan_fields(plan)
    return " ".join(f"{name}={value}" for name, value in after.items() if value != before[name])
