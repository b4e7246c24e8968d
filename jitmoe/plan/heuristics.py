"""Which plan for which problem: the only place with opinions.

Every threshold says what it was measured on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jitmoe.plan import mega_moe_check
from jitmoe.plan.formats import format_of
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MAX_TOKENS, QUANT_GROUP, MoeProblem
from jitmoe.plan.variant import is_gated

# Tokens per active expert up to which the two warpgroups share one 64-token tile. Above it a second
# read of an expert's weights costs more than half-empty tiles: decode takes 0.93 to 0.98 of
# prefill's time at 32 of S1 to S4, 1.24 to 1.33 at 96 and 128 (H200, 2026-11-30).
DECODE_TOKENS_PER_EXPERT = 64.0
# Of MXFP4 beside e4m3 tokens, whose wide tiles cost the decode kernel more: prefill takes 1.06 to
# 1.12 of its time at 24 of S1, S3 and S4 and 0.98 of S2, 1.04 at 28 of S1, 0.94 at 30 of S4, 0.83
# to 0.93 at 32 (H200, 2026-12-01). Beside bf16 tokens 1.2 to 1.4 at 24 and 32 of S1 to S4, 0.7 at
# 128 (H200, 2026-11-30), so for them it is 64 too: a guess.
W4A8_DECODE_TOKENS_PER_EXPERT = 29.0

# (stages, task slots, pairs sorted locally) tried, best first. 3 x 32 KiB in flight saturate
# memory, 4 or 5 stages are steadier (decode stream, 2026-11-29). Deliver warps hold a task slot
# for long: in prefill 3 slots beat 2 by 0.6 to 6 % at 8192 tokens, more than a fourth stage gains.
# 4,096 pairs sorted locally, which needs no whole grid at once, are level with the grid's sort:
# 169.9 and 169.6 us at 512 tokens of S2 (all H200, 2026-11-30).
_LOCAL = ((3, 4096), (3, 2048), (2, 1024), (2, 512))
SIZES = {
    "decode": tuple((num_stages, *more) for num_stages in (5, 4, 3) for more in _LOCAL),
    "prefill": ((4, 3, 0), (3, 3, 0), (3, 2, 0)),
}
# MXFP4's stages are half as large.
MX_SIZES = tuple((num_stages, *more) for num_stages in range(9, 2, -1) for more in _LOCAL)
# With stages of weights that wait to be expanded. Guess.
EXPAND_SIZES = ((3, 3, 0, 3), (3, 3, 0, 2), (3, 2, 0, 2), (2, 3, 0, 2))

# Rows beyond full tiles that an expert's last takes along in prefill, where a tile of their own
# would read its weights again: 512 tokens of S1 and S3 -6 and -8 %, 2048 of S2 -4 %. 32 instead of
# 16 are level (H200, 2026-11-30). Not with biases, for which there are no registers beside them.
EXTRA_TOKENS = 16


@dataclass(frozen=True)
class Floor:
    """The least time a problem can take: the larger of its bytes and its FLOP at the GPU's
    sustained rates.
    """

    memory_us: float
    math_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.math_us)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_us >= self.math_us else "math"


def floor(problem: MoeProblem, gpu: GpuSpec) -> Floor:
    """Weights of the experts hit, each once, and activations in and out, against the FLOP of both
    GEMMs.
    """
    num_bytes = problem.num_active_experts * problem.expert_bytes + problem.activation_bytes
    return Floor(num_bytes / gpu.read_gbps * 1e-3, problem.flop / gpu.tflops(problem.format) * 1e-6)


def bucket(problem: MoeProblem) -> str:
    """The bucket of a problem; the kernel depends on the token count through it alone."""
    is_w4a8 = problem.format == "mxfp4_fp8"
    most = W4A8_DECODE_TOKENS_PER_EXPERT if is_w4a8 else DECODE_TOKENS_PER_EXPERT
    return "decode" if problem.tokens_per_active_expert <= most else "prefill"


def choose(problem: MoeProblem, gpu: GpuSpec, **variant) -> MegaMoePlan:
    """The plan for `problem` on `gpu`; `variant` are further fields of it, as `Variant.plan_fields`
    gives them. Raises PlanError if none fits, or if only one of the two has a gate.
    """
    activation = variant.get("activation", MegaMoePlan.activation)
    if problem.gated != is_gated(activation):
        raise PlanError(
            f"activation {activation} is of experts with{'out' * problem.gated} a gate, the "
            f"problem has gated {problem.gated}; change one of them"
        )
    name, has_bias = bucket(problem), variant.get("has_bias", False)
    is_mx = format_of(problem.format).is_mx
    many_ranks = variant.get("num_ranks", 1) > 1
    if has_one_bucket(problem.format, variant.get("batch_invariant", False), many_ranks):
        name = "decode"
    sizes = {"decode": MX_SIZES, "prefill": EXPAND_SIZES} if is_mx else SIZES
    producer_regs, math_regs = _registers(name, problem, has_bias, many_ranks)
    for num_stages, num_task_slots, num_local_pairs, *packed in sizes[name]:
        plan = MegaMoePlan(
            arch=gpu.arch,
            bucket=name,
            hidden=problem.hidden,
            intermediate=problem.intermediate,
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            num_stages=num_stages,
            num_local_pairs=num_local_pairs,
            producer_regs=producer_regs,
            math_regs=math_regs,
            unroll_k=_unroll_k(name, problem, has_bias, many_ranks),
            num_task_slots=num_task_slots,
            num_packed_stages=packed[0] if packed else 0,
            extra_tokens=EXTRA_TOKENS if name == "prefill" and not has_bias else 0,
            format=problem.format,
            **variant,
        )
        mega_moe_check.check(plan)  # before its roles are asked for
        if replace(plan, trace=True).smem.num_bytes <= gpu.smem_bytes:  # it may be traced later
            plan.check(gpu)
            return plan
    raise PlanError(f"no ring of 3 stages fits {gpu.smem_bytes:,} B of shared memory for {problem}")


def _registers(name: str, problem: MoeProblem, has_bias: bool, many_ranks: bool) -> tuple[int, int]:
    """Of the warps beside math, and of math: those that most kernels of the bucket do not spill
    with. Some do, and the build refuses them. Known, with biases: W4A8 in prefill, traced, with 17
    slots (8 bytes); bf16 in prefill on many ranks without presum (36 to 44), or traced without a
    gate (12 to 64); W4A8 in decode on many ranks with 10 or 17 slots (4 and 36). Without: W4A8 and
    FP8 in decode on many ranks, traced, where top_k is no power of two (20 to 48).
    """
    form = format_of(problem.format)
    if name == "prefill" and form.is_mx:
        return (48, 208) if form.quantizes else (64, 192)
    if name == "prefill":
        return 56, 224
    # Dividing by top_k, where it is no power of two, takes a register more of those beside math.
    divides = problem.top_k & (problem.top_k - 1) != 0
    if form.is_mx and form.quantizes and not (many_ranks and divides):
        return 80, 176
    if form.quantizes and (many_ranks or has_bias):
        return 88, 168
    return (96, 160) if problem.gated or not form.is_mx else (88, 168)


def _unroll_k(name: str, problem: MoeProblem, has_bias: bool, many_ranks: bool) -> int:
    """k-blocks of the main loop in one piece: the more, the rarer are the tensor cores drained, and
    the more instructions have to be fetched.

    2 are 0.4 to 1.0 % quicker than 4 at 512 and 2048 tokens of S1 and S4, level on S3 and 0.2 %
    slower at 8192 of S1; 8 are 2 % slower (H200, 2026-12-01). On many ranks, and beyond 16 slots,
    where the code around the loop is longest, 2 spill. Tiles of 16 k-blocks and fewer (S2) are 2 to
    3 % quicker with 1; in decode 2 and 4 are no quicker than 1, or 3 % slower at 512 tokens of S2
    (H200, 2026-11-30). With biases 4 and 2 spill at some sizes. Sums in bf16 need no promotion:
    their loop keeps the tensor cores busy as it is. Beside warps that expand MXFP4, 2 are 1 %
    quicker than 1 at 2048 tokens of S1, and spill in traced kernels.
    """
    if not format_of(problem.format).quantizes or format_of(problem.format).is_mx:
        return 1
    is_short = problem.hidden <= 16 * QUANT_GROUP
    spills = has_bias or many_ranks or problem.top_k > 16
    return 1 if name == "decode" or is_short or spills else 2


def plans_of_model(problem: MoeProblem, gpu: GpuSpec, **variant) -> dict[str, MegaMoePlan]:
    """Every kernel a model can need at any token count, by bucket.

    `problem.num_tokens` is ignored; `variant` is as in `choose`.
    """
    plans = {}
    for num_tokens in (1, MAX_TOKENS):
        plan = choose(replace(problem, num_tokens=num_tokens), gpu, **variant)
        plans.setdefault(plan.bucket, plan)
    return plans


def has_one_bucket(format: str, batch_invariant: bool, many_ranks: bool) -> bool:
    """Whether decode serves all token counts: MXFP4 in prefill is added up in another order, and of
    many ranks may have no kernel.
    """
    is_mx = format_of(format).is_mx
    return batch_invariant and is_mx or many_ranks and format in mega_moe_check.NO_PREFILL_OF_RANKS


def decode_limit(problem: MoeProblem) -> int:
    """The largest token count of the decode bucket (tokens per active expert grow with tokens);
    `num_tokens` is ignored.
    """
    low, high = 0, MAX_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        sized = replace(problem, num_tokens=middle)
        low, high = (middle, high) if bucket(sized) == "decode" else (low, middle - 1)
    return low


def token_range(problem: MoeProblem) -> tuple[int, int]:
    """The first and the last token count that a plan measured for `problem` serves: those up to the
    same power of two that are in the same bucket.
    """
    num_tokens, limit = max(problem.num_tokens, 1), decode_limit(problem)
    last = 1 << (num_tokens - 1).bit_length()
    first = last // 2 + 1
    return (first, min(last, limit)) if num_tokens <= limit else (max(first, limit + 1), last)
