"""Plans of dispatch and combine between nodes: what is refused, what they add up to, and that they
compile.
"""

from dataclasses import replace
from itertools import cycle, product

import pytest

from jitmoe.jit.build import build_many
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.gpu import GPUS, HOPPER_SMEM_BYTES
from jitmoe.plan.hybrid import MAX_BLOCK_CHANNELS
from jitmoe.plan.hybrid_combine import HybridCombinePlan
from jitmoe.plan.hybrid_dispatch import HybridDispatchPlan
from jitmoe.plan.models import MODELS
from jitmoe.plan.plan import PlanError
from jitmoe.plan.transfer_pairs import combine_of, dispatch_plan

H200 = GPUS["h200"]
PLAN = dispatch_plan("sm_90a", 7168, 16, 8, 16, num_nodes=2)
LAYOUTS = {"tokens": {}, "experts": {"expert_rows": True, "alignment": 128}}


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"rail": "nvlink"}, "rail must be one of memory, delayed, gin, got 'nvlink'"),
        ({"num_nodes": 3}, "num_nodes must be 2 to 32 and share out 16 ranks, got 3"),
        ({"num_nodes": 1}, "num_nodes must be 2 to 32 and share out 16 ranks, got 1"),
        ({"num_nodes": 64, "num_ranks": 64}, "num_nodes must be 2 to 32"),
        ({"num_ranks": 66, "num_nodes": 2}, "num_ranks must be 1 to 64, got 66"),
        ({"hidden": 7172}, "hidden must be a multiple of 8, got 7172"),
        ({"hidden": 192, "format": "fp8"}, "hidden must be a multiple of 128, got 192"),
        ({"top_k": 33}, "top_k must be 1 to 32, got 33"),
        ({"alignment": 128}, "and 1 unless rows are sorted by expert, got 128"),
        ({"hidden": 1 << 16}, "leave no room for 4 of them in shared memory"),
        ({"num_experts": 1024, "num_ranks": 64}, "too many for shared memory"),
        ({"arch": "sm_100a"}, "the plan is for sm_100a"),
    ],
)
def test_refusals(changes, text):
    with pytest.raises(PlanError, match=text.replace("(", r"\(")):
        replace(PLAN, **changes).check(H200)


def test_rows_that_combine_has_no_room_for_are_refused_there():
    wide = replace(PLAN, hidden=1 << 15, format="fp8")
    with pytest.raises(PlanError, match="rows of 65,536 bytes leave no room for 4"):
        combine_of(wide).check(H200)
    combine_of(replace(wide, expert_rows=True)).check(H200)


@pytest.mark.parametrize("rail", ["memory", "delayed", "gin"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_shared_memory_and_registers_are_used_up_at_most(format, layout, rail):
    for hidden, num_nodes in product((128, 512, 2048, 4096, 7168, 12_288, 16_384), (2, 4, 16)):
        plan = replace(PLAN, hidden=hidden, format=format, rail=rail, num_nodes=num_nodes)
        plan = replace(plan, **LAYOUTS[layout])
        combine = combine_of(plan)
        for one in (plan, combine):
            one.check(H200)
            assert one.smem.num_bytes <= HOPPER_SMEM_BYTES
            assert sum(32 * role.num_warps * role.num_regs for role in one.roles) <= 65536
            assert 2 <= one.block_channels <= MAX_BLOCK_CHANNELS and one.block_channels % 2 == 0
        assert isinstance(plan, HybridDispatchPlan) and isinstance(combine, HybridCombinePlan)
        up, forward = combine.roles
        split = (up.num_regs, forward.num_regs)
        shifts = layout == "tokens" and combine.block_channels in (4, 8) and rail != "gin"
        assert split == (40, 216) if shifts else split[0] == split[1] >= 128
        if rail == "gin":  # whose functions forbid setmaxnreg: what the launch gives
            for one in (plan, combine):
                given = min(65536 // one.num_threads, 255) // 8 * 8
                assert {role.num_regs for role in one.roles} == {given}
        assert up.num_warps == forward.num_warps == combine.block_channels
        assert ("rows" in combine.smem.offsets) == (layout == "tokens")
        assert ("rail_queue" in combine.smem.offsets) == (rail == "delayed")
    assert (PLAN.block_channels, combine_of(PLAN).block_channels) == (6, MAX_BLOCK_CHANNELS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_memory_serves_both(layout):
    plan = replace(PLAN, **LAYOUTS[layout])
    memory = plan.symmetric(64)
    assert memory == combine_of(plan).symmetric(64)
    assert memory == replace(plan, local_ranks=16).memory_plan.symmetric(64)
    begins = [begin for begin, _ in memory.zeroed]
    assert len(begins) == 7 and max(begins) < memory.offsets["counts"]
    shapes = {region.name: region.shape for region in memory.regions}
    assert shapes["came"] == (1, 64, plan.message_bytes), "none comes from the own node"
    assert shapes["node_sums"] == (2, 64, 8, 7168) and shapes["sums"] == (64, 2, 7168)
    assert shapes["rail_tails"][1] >= plan.max_blocks * plan.block_channels


def test_messages_hold_a_row_its_scales_and_words():
    for hidden, format, top_k in product((128, 640, 7168), ("bf16", "fp8"), (1, 8, 32)):
        plan = replace(PLAN, hidden=hidden, format=format, top_k=top_k)
        assert plan.message_words_at >= plan.row_bytes + 4 * plan.num_groups
        assert plan.message_bytes >= plan.message_words_at + 4 + 16 * top_k
        assert plan.message_bytes % 128 == plan.message_words_at % 16 == 0
        assert plan.count_words % 4 == 0 <= plan.count_words - plan.num_columns < 4


@pytest.mark.parametrize("tokens, blocks", [(1, 1), (1, 144), (7, 2), (4096, 64), (262_144, 144)])
def test_channels_hold_all_tokens(tokens, blocks):
    per_channel = PLAN.channel_tokens(tokens, blocks)
    most = blocks * PLAN.block_channels
    assert (per_channel - 1) * most < tokens <= per_channel * most


def test_parts_are_nodes_and_mates():
    few = replace(PLAN, top_k=3, num_nodes=8)
    assert (few.node_ranks, few.max_parts, few.max_node_parts) == (2, 3, 2)
    assert (PLAN.node_ranks, PLAN.max_parts, PLAN.max_node_parts) == (8, 2, 8)


def test_one_node_has_the_plans_of_one_domain():
    assert type(dispatch_plan("sm_90a", 512, 4, 2, 4)) is DispatchPlan
    assert combine_of(dispatch_plan("sm_90a", 512, 4, 2, 4)).name == "combine"
    assert combine_of(PLAN).name == "hybrid_combine"


def _plans():
    """Layouts, formats, rails and numbers of nodes take turns over all models."""
    shapes = sorted({(m.hidden, m.num_experts, m.top_k) for m in MODELS.values()})
    ways = cycle(product(LAYOUTS.values(), ("bf16", "fp8"), ("memory", "delayed")))
    nodes = cycle((2, 4, 8))
    for (hidden, num_experts, top_k), way, num_nodes in zip(shapes, ways, nodes, strict=False):
        layout, format, rail = way
        yield dispatch_plan(
            *("sm_90a", hidden, max(num_experts // 16, 1), top_k, 16),
            format=format if hidden % 128 == 0 else "bf16",
            num_nodes=num_nodes,
            rail=rail,
            local_ranks=16 if rail == "delayed" else 1,
            **layout,
        )
    for layout, format in product(LAYOUTS.values(), ("bf16", "fp8")):
        yield replace(PLAN, format=format, **layout)
    yield replace(PLAN, hidden=8, num_experts=1, top_k=1, num_ranks=2)
    yield replace(PLAN, top_k=32, num_ranks=64, num_experts=16, expert_rows=True)
    yield replace(PLAN, num_experts=100, top_k=5, num_ranks=6, num_nodes=3, format="fp8")


def test_all_models_compile():
    """Without spills or warnings of ptxas, which fail the build."""
    plans = list(_plans())
    plans += list({combine_of(plan) for plan in plans})
    for plan in plans:
        plan.check(H200)
    failed = [outcome.error for outcome in build_many(plans) if outcome.error]
    assert not failed, failed[0]
