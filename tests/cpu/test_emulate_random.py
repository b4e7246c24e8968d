"""Random plans and random calls of them, emulated, against the oracle."""

import random
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem
from jitmoe.plan.variant import is_gated

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

KINDS = {True: "swiglu", False: "relu2_no_gate"}
NUM_PLANS, CALLS_PER_PLAN = 14, 15
MOST_TOKENS = 150
MOST_WORK = 20e6  # pairs * hidden * intermediate of a call: some tenths of a second
EDGES = (8, 9, 16, 17, 32, 33, 64, 65, 128, 129)  # where tiles and their widths end
OWN_ROUTINGS = ("same_expert", "all_unused")
ROUTINGS = (*reference.ROUTINGS, *OWN_ROUTINGS)


def random_plan(rng: random.Random, bucket: str) -> MegaMoePlan:
    hidden = 128 * rng.randint(1, 6)
    intermediate = rng.choice([16, 128]) * rng.randint(1, 3) + rng.choice([0, 16, 80, 128])
    problem = MoeProblem(
        1 if bucket == "decode" else MAX_TOKENS,
        hidden,
        intermediate,
        num_experts=rng.choice([1, 2, 3, 5, 8, 33]),
        top_k=rng.choice([1, 2, 3, 4, 7]),
        gated=rng.random() < 0.7,
    )
    plan = choose(problem, GPUS["h200"], activation=KINDS[problem.gated])
    assert plan.bucket == bucket
    while True:
        other = replace(
            plan,
            num_stages=rng.randint(3, 5),
            num_task_slots=rng.randint(2, 4),
            unroll_k=rng.choice([1, 2, 3, 4]),
            format=rng.choice(["fp8_block", "fp8_block", "fp8_channel"]),
            num_local_pairs=rng.choice([1, 20, 150, 2048]) if bucket == "decode" else 0,
            extra_tokens=rng.choice([0, 8, 16]) if bucket == "prefill" else 0,
        )
        try:
            other.check(GPUS["h200"])
        except PlanError:  # too many stages
            continue
        return other


def random_plans() -> list[MegaMoePlan]:
    rng = random.Random(0)
    return [random_plan(rng, ("decode", "prefill")[i % 2]) for i in range(NUM_PLANS)]


PLANS = random_plans()


@cache
def layer_of(plan: MegaMoePlan) -> reference.Layer:
    sizes = plan.num_experts, plan.hidden, plan.intermediate
    outliers = plan.num_task_slots % 2
    kind = {"format": plan.format, "gated": is_gated(plan.activation)}
    return reference.random_layer(*sizes, seed=0, outliers=outliers, **kind)


@dataclass(frozen=True)
class Call:
    num_tokens: int
    routing: str
    x_format: str
    x_gap: int  # elements from the end of a row of x to the next
    scale_order: str
    ids_format: str
    weights_format: str
    spare_tokens: int  # room in the workspace beyond num_tokens
    num_blocks: int
    seed: int


def calls(plan: MegaMoePlan) -> st.SearchStrategy[Call]:
    """Every field from a set of its own: hypothesis swaps values between like strategies, and most
    calls would be near-copies of others.
    """
    most = min(MOST_TOKENS, int(MOST_WORK / (plan.top_k * plan.hidden * plan.intermediate)))
    edges = [edge for edge in EDGES if edge <= most]
    distinct = plan.top_k <= plan.num_experts
    routings = [r for r in ROUTINGS if distinct or r in ("duplicates", *OWN_ROUTINGS)]
    return st.builds(
        Call,
        num_tokens=st.sampled_from([*range(1, most + 1), *edges * 4, 0]),
        routing=st.sampled_from(routings),
        x_format=st.sampled_from(["bf16", "e4m3"]),
        x_gap=st.sampled_from([0, 16, 128]),
        scale_order=st.sampled_from("CF"),
        ids_format=st.sampled_from(["i4", "i8"]),
        weights_format=st.sampled_from(["f32", "bf16"]),
        spare_tokens=st.sampled_from([0, 1, 70]),
        num_blocks=st.sampled_from(range(1, 7)),
        seed=st.integers(0, 2**32 - 1),
    )


def make_tokens(call: Call, plan: MegaMoePlan) -> reference.Tokens:
    tokens = reference.random_tokens(
        call.num_tokens,
        plan.hidden,
        plan.num_experts,
        plan.top_k,
        call.seed,
        "duplicates" if call.routing in OWN_ROUTINGS else call.routing,
    )
    if call.routing == "same_expert":
        tokens.topk_ids[:] = plan.num_experts - 1
    if call.routing == "all_unused":
        tokens.topk_ids[:] = plan.num_experts
    return tokens


def spread(rows: np.ndarray, gap: int) -> np.ndarray:
    """The same rows, `gap` elements apart; what lies between is NaN."""
    wide = np.full((len(rows), rows.shape[1] + gap), np.iinfo(rows.dtype).max, rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


@pytest.mark.parametrize("idx", range(len(PLANS)))
def test_random_calls(idx):
    plan = PLANS[idx]

    @seed(idx)
    @settings(
        max_examples=CALLS_PER_PLAN,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(calls(plan))
    def run(call: Call):
        check(plan, call)

    run()


def check(plan: MegaMoePlan, call: Call):
    layer, tokens = layer_of(plan), make_tokens(call, plan)
    codes, scale = fp8.quantize_tokens(tokens.x)
    if call.x_format == "e4m3":
        x = (spread(codes, call.x_gap), np.asarray(scale, order=call.scale_order))
    else:
        x = spread(fp8.encode_bf16(tokens.x), call.x_gap)
    ids = tokens.topk_ids.astype(call.ids_format)
    weights = tokens.topk_weights
    if call.weights_format == "bf16":
        weights = fp8.encode_bf16(weights)
    capacity = call.num_tokens + call.spare_tokens
    emulated = EmulatedLayer(plan, layer, max_tokens=capacity, num_blocks=call.num_blocks)
    y = emulated(x, ids, weights, seed=call.seed)
    call = codes, scale, ids, weights, *layer
    ref = reference.mega_moe(*call, requantize=True, activation=plan.activation)
    assert reference.relative_error(y, ref) < 5e-3  # duplicates add the same rounding several times
    assert reference.worst_element(y, ref) < 0.06
