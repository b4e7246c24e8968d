"""What a plan of the fused layer's kernel must be like beside what every plan must."""

from __future__ import annotations

from jitmoe.plan import variant
from jitmoe.plan.gpu import KERNEL_ARCHS
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MAX_RANKS, MoeProblem

# Kernels that spill with many ranks (NVRTC 12.9 and 13.0, 2026-11-30).
NO_PREFILL_OF_RANKS = ("mxfp4_fp8",)  # at most shapes; decode's serves all token counts
TOP_K_OF_RANKS = {"mxfp4_bf16": (1, 2, 3, 4, 8)}  # in decode


def check(plan) -> None:
    """Raises PlanError, one sentence, for a MegaMoePlan that there is no kernel for."""
    if plan.arch not in KERNEL_ARCHS:
        raise PlanError(
            f"the kernel exists for {', '.join(KERNEL_ARCHS)}, the plan is for {plan.arch}"
        )
    if plan.bucket not in ("decode", "prefill"):
        raise PlanError(f"bucket must be decode or prefill, got {plan.bucket!r}")
    try:
        variant.check_function(plan.activation, plan.up_first, plan.interleaved)
        MoeProblem(0, plan.hidden, plan.intermediate, plan.num_experts, plan.top_k, plan.format)
    except ValueError as error:
        raise PlanError(str(error)) from None
    least = 2 if plan.expands else 3
    if plan.num_stages < least:
        raise PlanError(f"the ring needs {least} stages for loads in flight, got {plan.num_stages}")
    if plan.num_packed_stages < 2 if plan.expands else plan.num_packed_stages != 0:
        raise PlanError(
            "num_packed_stages must be 2 or more for MXFP4 in prefill and else 0, "
            f"got {plan.num_packed_stages}"
        )
    if plan.num_task_slots < 2:
        raise PlanError(f"claiming ahead needs 2 task slots, got {plan.num_task_slots}")
    if not plan.split_tokens and not 1 <= plan.num_local_pairs <= 65_535:
        raise PlanError(
            "rows are sorted locally by 16-bit pair numbers: room for 1 to 65,535 of them, "
            f"got {plan.num_local_pairs:,}"
        )
    if plan.extra_tokens not in ((0, 8, 16) if plan.split_tokens else (0,)):
        allowed = "0, in prefill 8 or 16 too (columns of one multiply)"
        raise PlanError(f"extra_tokens must be {allowed}, got {plan.extra_tokens}")
    if not 1 <= plan.unroll_k <= 8:
        raise PlanError(f"unroll_k must be from 1 to 8, got {plan.unroll_k}")
    _check_ranks(plan)


def _check_ranks(plan) -> None:
    if not 1 <= plan.num_ranks <= MAX_RANKS:
        raise PlanError(f"num_ranks must be from 1 to {MAX_RANKS}, got {plan.num_ranks}")
    if plan.local_ranks not in (1, plan.num_ranks):
        raise PlanError(
            "a launch serves one rank or all of them: local_ranks must be 1 or num_ranks, "
            f"{plan.num_ranks}, got {plan.local_ranks}"
        )
    if plan.num_ranks == 1:
        return
    if plan.split_tokens and plan.format in NO_PREFILL_OF_RANKS:
        raise PlanError(
            f"no kernel of the prefill bucket multiplies {plan.format} on many ranks, for want of "
            "registers; take that of the decode bucket"
        )
    allowed = TOP_K_OF_RANKS.get(plan.format, (plan.top_k,))
    if not plan.split_tokens and plan.top_k not in allowed:
        raise PlanError(
            f"top_k must be one of {', '.join(map(str, allowed))} for {plan.format} on many ranks, "
            f"for want of registers, got {plan.top_k}; take mxfp4_fp8"
        )
    if plan.trace and plan.split_tokens:
        raise PlanError(
            "no kernel of the prefill bucket is traced with many ranks, for want of registers; "
            "trace fewer tokens a rank, in the decode bucket, or one rank"
        )
