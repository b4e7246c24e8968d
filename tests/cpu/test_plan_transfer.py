"""Plans of dispatch and combine: what is refused, what they add up to, and that they compile."""

from dataclasses import fields, replace

import pytest

from jitmoe.jit.build import build_many
from jitmoe.plan.combine import CombinePlan
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.models import MODELS
from jitmoe.plan.plan import PlanError
from jitmoe.plan.transfer import TransferPlan, num_sms_wanted
from jitmoe.plan.transfer_pairs import dispatch_plan

H200 = GPUS["h200"]
PLAN = DispatchPlan("sm_90a", hidden=7168, num_experts=32, top_k=8, num_ranks=8)


def combine_of(plan: DispatchPlan) -> CombinePlan:
    return CombinePlan(**{f.name: getattr(plan, f.name) for f in fields(TransferPlan)})


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"hidden": 4}, "hidden must be a multiple of 8, got 4"),
        ({"hidden": 7172}, "hidden must be a multiple of 8, got 7172"),
        ({"hidden": 192, "format": "fp8"}, "hidden must be a multiple of 128, got 192"),
        ({"format": "int4"}, "format must be bf16 or fp8, got 'int4'"),
        ({"top_k": 33}, "top_k must be 1 to 32, got 33"),
        ({"num_ranks": 65}, "num_ranks must be 1 to 64, got 65"),
        ({"num_experts": 0}, "num_experts must be 1 to 1024, got 0"),
        ({"alignment": 0}, "alignment must be at least 1"),
        ({"alignment": 128}, "and 1 unless rows are sorted by expert, got 128"),
        ({"hidden": 1 << 15}, "leave no room for 4 of them in shared memory"),
        ({"num_experts": 1024, "num_ranks": 64}, "too many for shared memory"),
        ({"arch": "sm_100a"}, "the plan is for sm_100a"),
    ],
)
def test_refusals(changes, text):
    with pytest.raises(PlanError, match=text.replace("(", r"\(")):
        replace(PLAN, **changes).check(H200)


def test_shared_memory_and_registers_are_used_up_at_most():
    for hidden in (128, 512, 2048, 4096, 7168, 12_288, 16_384):
        for format in ("bf16", "fp8"):
            plan = replace(PLAN, hidden=hidden, format=format)
            plan.check(H200)
            assert 4 <= plan.num_dispatch_warps <= 12 and 1 <= plan.num_row_buffers <= 2
            combine_of(plan).check(H200)
    assert PLAN.num_dispatch_warps == 12


def test_rows_and_memory():
    assert PLAN.num_rows(100) == 800
    sorted_ = replace(PLAN, expert_rows=True, alignment=128)
    assert sorted_.num_rows(100) == 800 * 8 + 127 * 32
    few = replace(sorted_, num_experts=2, num_ranks=8)
    assert few.num_rows(100) == 800 * 2 + 127 * 2, "a token has at most its experts here"
    assert PLAN.symmetric(64) == combine_of(PLAN).symmetric(64), "one memory serves both"
    begins = [begin for begin, _ in PLAN.symmetric(64).zeroed]
    assert len(begins) == 5 and max(begins) < PLAN.symmetric(64).offsets["counts"]


def test_blocks_that_keep_links_busy():
    assert num_sms_wanted(H200, PLAN) == 64
    assert num_sms_wanted(GPUS["h100-pcie"], PLAN) == 114, "which has no links"
    assert num_sms_wanted(GPUS["h20"], PLAN) == 64
    assert num_sms_wanted(H200, replace(PLAN, local_ranks=8)) == 132
    rail = [
        dispatch_plan("sm_90a", 7168, 256 // num_ranks, 8, num_ranks, num_nodes=nodes, rail="gin")
        for nodes, num_ranks in ((2, 16), (4, 32), (8, 64))
    ]
    assert [num_sms_wanted(H200, plan) for plan in rail] == [12, 6, 6], "a network is slower"


def _plans():
    shapes = {(m.hidden, m.num_experts, m.top_k) for m in MODELS.values()}
    for hidden, num_experts, top_k in sorted(shapes):
        for format in ("bf16", "fp8") if hidden % 128 == 0 else ("bf16",):
            for expert_rows in (False, True):
                yield DispatchPlan(
                    *("sm_90a", hidden, max(num_experts // 8, 1), top_k, 8, format, expert_rows),
                    alignment=128 if expert_rows else 1,
                    local_ranks=8 if expert_rows else 1,
                )
    yield replace(PLAN, hidden=8, num_experts=1, top_k=1, num_ranks=2)
    yield replace(PLAN, top_k=32, num_ranks=64, num_experts=16, expert_rows=True)
    yield replace(PLAN, num_experts=100, top_k=5, num_ranks=3, format="fp8")


def test_all_models_compile():
    """Without spills or warnings of ptxas, which fail the build."""
    plans = list(_plans())
    plans += list({combine_of(plan) for plan in plans})
    for plan in plans:
        plan.check(H200)
    failed = [outcome.error for outcome in build_many(plans) if outcome.error]
    assert not failed, failed[0]
