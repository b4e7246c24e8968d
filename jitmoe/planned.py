"""The plan of a call: the one given, a tuned one, or the heuristic's."""

from __future__ import annotations

from jitmoe import tuned
from jitmoe.jit.build import build
from jitmoe.jit.nvrtc import CompileError, ToolchainError
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import GpuSpec, gpu_spec
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
    """The plan that was given, if it fits, else a tuned one or the heuristic's: one for each token
    range and variant. Weights on the host get that of an H200. Raises ValueError for a plan that
    does not fit, and for an activation of experts with a gate where those of the weights have none,
    or the reverse.
    """
    _check_gate(weights, variant)
    fields = variant.plan_fields
    if given is not None:
        _check_plan(given, weights, top_k, fields)
        return given
    in_decode, power = num_tokens <= _decode_limit(weights, top_k), (num_tokens - 1).bit_length()
    key = ("plan", in_decode, power, top_k, *fields.values())
    plan = weights.memo.get(key)
    if plan is None:
        plan = weights.memo[key] = _choose(weights, num_tokens, top_k, fields)
    return plan


def _choose(weights: ExpertWeights, num_tokens: int, top_k: int, fields: dict) -> MegaMoePlan:
    """A tuned plan that does not compile, as after an update, is said once and not used."""
    problem, gpu = weights.problem(num_tokens, top_k), _gpu(weights)
    choice = tuned.choose(problem, gpu, **fields)
    if choice.origin is not None and weights.device != HOST:
        try:
            build(choice.plan)
        except ToolchainError:
            raise
        except CompileError as error:
            tuned.say_unusable(choice.origin, str(error).splitlines()[0])
            return heuristics.choose(problem, gpu, **fields)
    return choice.plan


def _gpu(weights: ExpertWeights) -> GpuSpec:
    return gpu_spec("h200") if weights.device == HOST else device_spec(weights.device)


def range_edges(weights: ExpertWeights, num_tokens: int, top_k: int, variant: Variant) -> list[int]:
    """The largest token count of every bucket, and of every range that a tuned plan serves or
    leaves to others, that calls of up to `num_tokens` tokens are in.
    """
    problem, limit = weights.problem(0, top_k), _decode_limit(weights, top_k)
    found = tuned.edges(problem, _gpu(weights), num_tokens, **variant.plan_fields)
    return sorted({*found, min(limit, num_tokens), num_tokens})


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
    if not isinstance(plan, MegaMoePlan):
        raise TypeError(f"plan must be a MegaMoePlan, got {type(plan).__name__}; leave it out")
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
