"""Plans of ranks that share experts: sizes by hand, what is refused, what one rank does not see."""

from dataclasses import replace

import pytest

from jitmoe.plan.formats import FORMATS
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.mega_moe_params import SYMMETRIC
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MAX_EXPERTS, MoeProblem
from jitmoe.run.ranks import MAX_RANKS

H200 = GPUS["h200"]
SMALL = MoeProblem(1, 256, 128, 2, 3)
BUCKETS = ("decode", "prefill")


def plans(problem=SMALL, **fields):
    return plans_of_model(problem, H200, **fields)


def region(memory, name):
    return next(region for region in memory.regions if region.name == name)


def plan_of(bucket, problem=SMALL, **fields):
    return plans(problem, **fields)[bucket]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(
    "fields, parts",
    [
        ({"num_ranks": 0}, ["num_ranks must be from 1 to 64, got 0"]),
        ({"num_ranks": -1}, ["num_ranks must be from 1 to 64, got -1"]),
        ({"num_ranks": 65}, ["num_ranks must be from 1 to 64, got 65"]),
        ({"num_ranks": 4, "local_ranks": 2}, ["1 or num_ranks, 4, got 2"]),
        ({"num_ranks": 4, "local_ranks": 0}, ["1 or num_ranks, 4, got 0"]),
        ({"num_ranks": 4, "local_ranks": 8}, ["1 or num_ranks, 4, got 8"]),
        ({"local_ranks": 2}, ["1 or num_ranks, 1, got 2"]),
    ],
)
def test_ranks_that_there_is_no_kernel_for(bucket, fields, parts):
    with pytest.raises(PlanError) as error:
        plans(**fields)
    message = str(error.value)
    assert all(part in message for part in parts) and "\n" not in message
    with pytest.raises(PlanError):
        replace(plan_of(bucket), **fields).check(H200)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, MAX_RANKS])
@pytest.mark.parametrize("presum", [True, False])
def test_ranks_that_there_is_a_kernel_for(num_ranks, presum):
    for local_ranks in {1, num_ranks}:
        found = plans(num_ranks=num_ranks, local_ranks=local_ranks, presum=presum)
        assert list(found) == list(BUCKETS)
        for plan in found.values():
            assert (plan.num_ranks, plan.local_ranks) == (num_ranks, local_ranks)


def test_traced_prefill_is_refused():
    for bucket in BUCKETS:
        replace(plan_of(bucket), trace=True).check(H200)
    replace(plan_of("decode", num_ranks=2), trace=True).check(H200)
    with pytest.raises(PlanError, match="prefill bucket is traced with many ranks, .*; trace"):
        replace(plan_of("prefill", num_ranks=2), trace=True).check(H200)


def test_kernels_that_would_spill_are_refused():
    packed = plan_of("prefill", replace(SMALL, format="mxfp4_fp8"))
    with pytest.raises(
        PlanError, match="prefill bucket multiplies mxfp4_fp8 on many ranks, .* take"
    ):
        replace(packed, num_ranks=2).check(H200)
    for top_k in (6, 9):
        slots = replace(SMALL, num_experts=top_k, format="mxfp4_bf16", top_k=top_k)
        plans(slots)
        with pytest.raises(
            PlanError, match=f"top_k must be one of .*, 8 for mxfp4_bf16 on .*, got {top_k}; take"
        ):
            plans(slots, num_ranks=2)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_symmetric_memory_by_hand(bucket):
    """10 tokens of each of 4 ranks with 2 experts, 3 slots."""
    regions = plan_of(bucket, num_ranks=4).symmetric(10)
    pairs, scales = 4 * 10 * 3, region(regions, "staged_scale").shape[2]
    assert scales >= 256 // 128
    sizes = {
        "launches": 4,
        "pairs_ready": 4 * 4,
        "tokens_ready": 4 * 4,
        "expert_done": 4 * 8,
        "bounds": 2 * 4 * 4,
        "pair_experts": 2 * 4 * pairs,
        "pair_weights": 2 * 4 * pairs,
        "staged_x": 2 * 10 * 256,
        "staged_scale": 2 * 10 * 4 * scales,
        "slots": 10 * 3 * 256 * 2,
    }
    assert {region.name: region.num_bytes for region in regions.regions} == sizes
    assert tuple(sizes) == SYMMETRIC
    end = 0
    for name, size in sizes.items():
        assert regions.offsets[name] == -(-end // 256) * 256
        end = regions.offsets[name] + size
    assert regions.num_bytes >= end


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("presum", [True, False])
def test_symmetric_memory_is_the_same_in_both_buckets(format, presum):
    found = plans(replace(SMALL, format=format), num_ranks=8, presum=presum)
    assert list(found) == (["decode"] if format == "mxfp4_fp8" else list(BUCKETS))
    decode = found["decode"]
    prefill = replace(decode, bucket="prefill")
    for rank_tokens in (0, 1, 64, 1000):
        assert decode.symmetric(rank_tokens) == prefill.symmetric(rank_tokens)
    width = FORMATS[format].element_bytes
    assert region(decode.symmetric(64), "staged_x").num_bytes == 2 * 64 * 256 * width
    assert (region(decode.symmetric(64), "staged_scale").num_bytes > 0) == (width == 1)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_more_counters_and_shared_memory_than_one_rank(bucket):
    one, many = plan_of(bucket), plan_of(bucket, num_ranks=8)
    for num_tokens in (1, 100, 5000):
        more = many.bank_words(num_tokens) - one.bank_words(num_tokens)
        assert 64 + 2 - 32 < more < 64 + 2 + 32  # two counters' lines and one of each expert
    names = [{region.name for region in plan.smem.regions} for plan in (one, many)]
    assert names[1] - names[0] == {"summed"} and names[0] < names[1]
    # The launch's number, and whether it was given up.
    assert (region(one.smem, "first").shape, region(many.smem, "first").shape) == ((3,), (5,))


@pytest.mark.parametrize("bucket", BUCKETS)
def test_parameters_of_ranks_come_last_but_for_an_address_of_the_call(bucket):
    one, many = (plan_of(bucket, num_ranks=num).params for num in (1, 8))
    names = [param.name for param in many]
    assert names[names.index("expert_counts") + 1] == "expert_map"
    many = [param for param in many if param.name != "expert_map"]
    assert tuple(many[: len(one)]) == one
    offsets = [f"{name}_at" for name in SYMMETRIC]
    own = ["rank", "rank_tokens", "num_own_tokens", "rank_capacity"]
    own += ["num_logical_experts", "max_replicas"]
    assert [param.name for param in many[len(one) :]] == ["peers", *offsets, *own]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_slices_only_where_rows_are_summed(bucket):
    for num_ranks, presum in ((1, True), (1, False), (8, True)):
        plan = plan_of(bucket, num_ranks=num_ranks, presum=presum)
        assert region(plan.scratch(10), "slices").num_bytes == 10 * 3 * 256 * 2
    assert region(plan_of(bucket, num_ranks=8, presum=False).scratch(10), "slices").num_bytes == 0


@pytest.mark.parametrize("format", ["bf16", "mxfp4_bf16"])
def test_tokens_are_copied_whatever_their_format(format):
    """They are fetched from other ranks."""
    problem = replace(SMALL, format=format)
    assert (
        region(plan_of("decode", problem, num_ranks=2).scratch(10), "pool").num_bytes
        == 10 * 256 * 2
    )


@pytest.mark.parametrize("bucket", BUCKETS)
def test_ranks_wait_for_each_other_in_the_whole_grid(bucket):
    plan = plan_of(bucket, num_ranks=2)
    assert plan.needs_whole_grid(1, x_is_bf16=False) and plan.needs_whole_grid(1, x_is_bf16=True)


@pytest.mark.parametrize("format", FORMATS)
def test_the_most_experts_fit(format):
    problem = MoeProblem(1, 256, 128, MAX_EXPERTS, 8 if format == "mxfp4_bf16" else 32, format)
    for plan in plans(problem, num_ranks=MAX_RANKS).values():
        assert plan.smem.num_bytes <= H200.smem_bytes
        assert region(plan.symmetric(1), "expert_done").shape == (MAX_RANKS * MAX_EXPERTS,)
