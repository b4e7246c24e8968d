"""The plan of a call: the one given, or the heuristic's."""

from __future__ import annotations

from jitmoe.plan import heuristics
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.variant import KINDS, Activation, Variant
from jitmoe.run.arrays import HOST
from jitmoe.run.driver import device_spec
from jitmoe.weights import ExpertWeights


def find_plan(
    weights: ExpertWeights,
    num_tokens: int,
    top_k: int,
    variant: Variant,
    given: MegaMoePlan | None = None,
) -> MegaMoePlan:
    """The plan that was given, if it fits, else the heuristic's: one for each bucket and variant.
    Weights on the host get that of an H200. Raises ValueError for a plan that does not fit, and for
    an activation of experts with a gate where those of the weights have none, or the reverse.
    """
    _check_gate(weights, variant)
    fields = variant.plan_fields
    if given is not None:
        _check_plan(given, weights, top_k, fields)
        return given
    key = ("plan", num_tokens <= _decode_limit(weights, top_k), top_k, *fields.values())
    plan = weights.memo.get(key)
    if plan is None:
        problem = weights.problem(num_tokens, top_k)
        gpu = gpu_spec("h200") if weights.device == HOST else device_spec(weights.device)
        plan = weights.memo[key] = heuristics.choose(problem, gpu, **fields)
    return plan


def bucket_edges(weights: ExpertWeights, num_tokens: int, top_k: int) -> list[int]:
    """The largest token count of every bucket that calls of up to `num_tokens` tokens are in."""
    limit = _decode_limit(weights, top_k)
    return [num_tokens] if num_tokens <= limit else [limit, num_tokens]


def _decode_limit(weights: ExpertWeights, top_k: int) -> int:
    """The most tokens of the decode bucket."""
    key = ("decode_limit", top_k)
    limit = weights.memo.get(key)
    if limit is None:
        limit = weights.memo[key] = heuristics.decode_limit(weights.problem(0, top_k))
    return limit


def _check_gate(weights: ExpertWeights, variant: Variant) -> None:
    if weights.gated == variant.activation.gated:
        return
    kinds = ", ".join(kind for kind in KINDS if Activation(kind).gated == weights.gated)
    raise ValueError(
        f"w13 has {weights.w13.shape[1]:,} rows for {weights.intermediate:,} channels of w2: "
        f"activation must be one of {kinds}, got {variant.activation.kind!r}; take one of experts "
        f"with{'out' * (not weights.gated)} a gate"
    )


def _check_plan(plan: MegaMoePlan, weights: ExpertWeights, top_k: int, fields: dict) -> None:
    wanted = (weights.hidden, weights.intermediate, weights.num_experts, top_k)
    got = (plan.hidden, plan.intermediate, plan.num_experts, plan.top_k)
    fields = {"format": weights.format, **fields}
    if wanted != got:
        raise ValueError(
            f"the plan is for (hidden, intermediate, num_experts, top_k) = {got}, "
            f"the call has {wanted}; plan again"
        )
    for name, value in fields.items():
        if getattr(plan, name) != value:
            raise ValueError(
                f"the plan is for {name} {getattr(plan, name)!r}, the call has {value!r}; "
                "plan again for it, or leave plan= out"
            )
