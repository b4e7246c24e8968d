"""Problems, GPUs, plans and the heuristic: every limit with its message, and what always holds."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from jitmoe.mxfp4 import packed_shape
from jitmoe.plan.formats import FORMATS
from jitmoe.plan.gpu import GPUS, gpu_spec, match_device
from jitmoe.plan.heuristics import (
    DECODE_TOKENS_PER_EXPERT,
    SIZES,
    W4A8_DECODE_TOKENS_PER_EXPERT,
    bucket,
    choose,
    decode_limit,
    floor,
    plans_of_model,
)
from jitmoe.plan.plan import PlanError, Role, check_roles
from jitmoe.plan.problem import MAX_EXPERTS, MAX_TOKENS, MoeProblem
from jitmoe.plan.spread import stride

H200 = GPUS["h200"]
S1 = MoeProblem(1, 7168, 2048, 32, 8)  # DeepSeek-V3, one rank of 8
S2 = MoeProblem(1, 2048, 768, 128, 8)
S3 = MoeProblem(1, 4096, 14336, 8, 2)
S4 = MoeProblem(1, 4096, 2048, 32, 6)
HOPPERS = [gpu for gpu in GPUS.values() if gpu.arch == "sm_90a"]
SHAPES = [(128, 16), (384, 208), (2048, 768), (4096, 14336), (7168, 2048), (16384, 32768)]
EXPERTS = [(1, 1), (1, 8), (8, 2), (32, 8), (384, 8), (MAX_EXPERTS, 1), (MAX_EXPERTS, 32)]
GRID = [
    MoeProblem(num_tokens, hidden, intermediate, num_experts, top_k)
    for num_tokens, (hidden, intermediate), (num_experts, top_k) in product(
        (0, 1, 3, 64, 1000, MAX_TOKENS), SHAPES, EXPERTS
    )
]


def with_tokens(problem, num_tokens):
    return replace(problem, num_tokens=num_tokens)


# Problems.

TOKENS = ("integer from 0 to 262,144", "split the batch over several calls")
RANKS = ("integer from 1 to 1,024", "shard the experts over ranks")
SLOTS = ("integer from 1 to 32", "split the slots over two calls and add the results")
HIDDEN, MIDDLE = "multiple of 128 up to 16,384", "multiple of 16 up to 32,768"
PAD, SHARD = "pad the weights with zeros to a multiple", "shard the layer"
LIMITS = [
    ("num_tokens", (-1, MAX_TOKENS + 1, 1.0, "1", None, True, False), *TOKENS),
    ("num_experts", (0, 1025, 2.0, "8", True), *RANKS),
    ("top_k", (0, 33, None, True), *SLOTS),
    ("hidden", (0, 64, 7000, -128, 128.0, True), HIDDEN, PAD),
    ("hidden", (16_385, 16_512, np.int64(1 << 20)), HIDDEN, SHARD),
    ("intermediate", (0, 8, 200, "16", True, np.int32(1000), np.float32(16)), MIDDLE, PAD),
    ("intermediate", (32_769, 32_784), MIDDLE, SHARD),
]


@pytest.mark.parametrize(
    ("field", "got", "allowed", "remedy"),
    [(field, got, *rest) for field, values, *rest in LIMITS for got in values],
)
def test_problem_refuses(field, got, allowed, remedy):
    with pytest.raises(ValueError) as error:
        replace(S1, **{field: got})
    is_number = isinstance(got, int | np.integer) and not isinstance(got, bool)
    shown = f"{got:,}" if is_number else repr(got)
    article = "a" if allowed.startswith("multiple") else "an"
    assert str(error.value) == f"{field} must be {article} {allowed}, got {shown}; {remedy}"


def test_numbers_of_messages_are_readable():
    for field, got, shown in [
        ("num_tokens", 262_145, "got 262,145; "),
        ("hidden", 16_512, "got 16,512; "),
        ("intermediate", np.int64(-16_016), "got -16,016; "),
        ("top_k", True, "got True; "),
        ("num_experts", "1025", "got '1025'; "),
    ]:
        with pytest.raises(ValueError, match=shown):
            replace(S1, **{field: got})


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_problem_accepts_numpy_integers(kind):
    sizes = (8192, 7168, 2048, 32, 8)
    own, ours = MoeProblem(*map(kind, sizes)), MoeProblem(*sizes)
    assert own == ours and hash(own) == hash(ours)
    assert bucket(own) == bucket(ours) and decode_limit(own) == decode_limit(ours)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", 0),
        ("num_tokens", MAX_TOKENS),
        ("num_experts", 1),
        ("num_experts", 1024),
        ("top_k", 1),
        ("top_k", 32),
        ("hidden", 128),
        ("hidden", 16384),
        ("intermediate", 16),
        ("intermediate", 32768),
    ],
)
def test_problem_accepts_its_limits(field, value):
    choose(replace(S1, **{field: value}), H200)


def test_problem_sizes_by_hand():
    problem = MoeProblem(3, 256, 192, 4, 2)
    assert problem.num_pairs == 6
    assert problem.flop == 6 * (2 * 256 * 384 + 2 * 192 * 256)
    assert problem.expert_bytes == 384 * 256 + 256 * 192 + 4 * (3 * 2 + 2 * 2)
    x, scales, routing, y = 256, 4 * 2, 8 * 2, 2 * 256
    assert problem.activation_bytes == 3 * (x + scales + routing + y)
    assert problem.num_active_experts == pytest.approx(4 * (1 - 0.5**3))
    assert with_tokens(problem, 1).num_active_experts == pytest.approx(2)
    assert with_tokens(problem, 0).num_active_experts == 0
    assert with_tokens(problem, 0).tokens_per_active_expert == 0
    assert replace(problem, num_experts=1).num_active_experts == 1  # top_k above num_experts
    assert replace(problem, num_experts=1).tokens_per_active_expert == 6


# GPUs.


def test_gpu_spec():
    assert gpu_spec("H200") is H200
    with pytest.raises(ValueError, match="must be one of h200, .*; got 'a100'"):
        gpu_spec("a100")
    assert H200.compute_capability == (9, 0)
    assert GPUS["b200"].compute_capability == (10, 0)


@pytest.mark.parametrize(
    ("device_name", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", "h20"),
        ("nvidia h200", "h200"),
    ],
)
def test_match_device(device_name, row):
    spec = match_device(device_name, "sm_90a", 100, 200_000)
    # Capacities are the device's own, rates those of the row.
    assert (spec.name, spec.arch, spec.num_sms, spec.smem_bytes) == (
        device_name,
        "sm_90a",
        100,
        200_000,
    )
    for rate in ("read_gbps", "fp8_tflops", "l2_bytes", "measured"):
        assert getattr(spec, rate) == getattr(GPUS[row], rate)


@pytest.mark.parametrize(
    "device_name", ["NVIDIA GH200 480GB", "NVIDIA H800", "NVIDIA H2000", "NVIDIA H100X", "GPU", ""]
)
def test_match_device_takes_whole_words(device_name):
    """A device that names no row is no H200 for holding its letters: it gets the slowest rates."""
    spec = match_device(device_name, "sm_90a", 132, 232_448)
    slowest = min(HOPPERS, key=lambda gpu: gpu.read_gbps)
    assert (spec.read_gbps, spec.fp8_tflops) == (slowest.read_gbps, slowest.fp8_tflops)
    assert spec.read_gbps < H200.read_gbps and spec.measured is False
    assert (spec.name, spec.num_sms, spec.smem_bytes) == (device_name, 132, 232_448)
    choose(S1, spec)


@pytest.mark.parametrize(
    ("device_name", "arch"), [("NVIDIA A100-SXM4-80GB", "sm_80"), ("NVIDIA B200", "sm_100a")]
)
def test_match_device_without_a_kernel(device_name, arch):
    with pytest.raises(ValueError) as error:
        match_device(device_name, arch, 108, 166_912)
    message = str(error.value)
    assert message.startswith(f"{device_name} is {arch}; kernels exist for sm_90a. Run on a Hopper")


# The heuristic.


def test_choose_on_the_grid():
    for gpu, problem in product(HOPPERS, GRID):
        plan = choose(problem, gpu)
        plan.check(gpu)
        assert plan.bucket == bucket(problem) and plan.arch == gpu.arch
        assert plan == choose(problem, gpu) and hash(plan) == hash(choose(problem, gpu))
        assert plan.smem.num_bytes <= gpu.smem_bytes


def test_one_more_stage_would_not_fit():
    for problem in GRID:
        plan = choose(problem, H200)
        assert 3 <= plan.num_stages <= SIZES[plan.bucket][0][0]
        if plan.num_stages < SIZES[plan.bucket][0][0]:
            more = replace(plan, num_stages=plan.num_stages + 1, num_local_pairs=512)
            assert replace(more, trace=True).smem.num_bytes > H200.smem_bytes


@pytest.mark.parametrize("format", FORMATS)
def test_every_chosen_plan_can_be_traced(format):
    for num_experts, has_bias, num_tokens in product(range(1, 257, 5), (False, True), (1, 8192)):
        problem = MoeProblem(
            num_tokens=num_tokens,
            hidden=4096,
            intermediate=1536,
            num_experts=num_experts,
            top_k=1,
            format=format,
        )
        replace(choose(problem, H200, has_bias=has_bias), trace=True).check(H200)


def test_plan_depends_on_tokens_through_the_bucket_alone():
    for problem in (S1, S2, S3, S4):
        plans = [choose(with_tokens(problem, n), H200) for n in (0, 1, 2, 100, 10_000, MAX_TOKENS)]
        assert len(set(plans)) == len({plan.bucket for plan in plans}) == 2
        assert plans_of_model(problem, H200) == {plan.bucket: plan for plan in plans}


LAYERS = [
    S1,
    S2,
    S3,
    S4,
    MoeProblem(0, 128, 16, 1, 1),
    MoeProblem(0, 4096, 14336, 8, 8),
    MoeProblem(0, 384, 208, 3, 2),
    MoeProblem(0, 7168, 2048, 384, 8),
    MoeProblem(0, 2048, 768, MAX_EXPERTS, 1),
    MoeProblem(0, 2048, 768, MAX_EXPERTS, 32),
    MoeProblem(0, 2048, 768, 1, 8),  # top_k above num_experts
]


@pytest.mark.parametrize("problem", LAYERS)
def test_bucket_edges(problem):
    limit = decode_limit(problem)
    below, above = with_tokens(problem, limit), with_tokens(problem, limit + 1)
    assert bucket(below) == "decode" and bucket(above) == "prefill"
    assert below.tokens_per_active_expert <= DECODE_TOKENS_PER_EXPERT
    assert above.tokens_per_active_expert > DECODE_TOKENS_PER_EXPERT
    sizes = [with_tokens(problem, n).tokens_per_active_expert for n in range(0, 2000, 7)]
    assert all(small < big for small, big in pairwise(sizes))


def test_bucket_edge_by_hand():
    # Every token hits all experts, so that tokens per expert are the tokens.
    assert decode_limit(MoeProblem(0, 128, 16, 4, 4)) == DECODE_TOKENS_PER_EXPERT
    assert decode_limit(MoeProblem(0, 128, 16, 1, 1)) == DECODE_TOKENS_PER_EXPERT
    assert decode_limit(MoeProblem(0, 128, 16, 1, 8)) == DECODE_TOKENS_PER_EXPERT / 8


@pytest.mark.parametrize("problem", LAYERS)
def test_decode_limit_is_what_bucket_says(problem):
    limit = decode_limit(problem)
    assert type(limit) is int and 0 < limit < MAX_TOKENS
    sizes = {0, 1, limit // 2, *range(max(0, limit - 40), limit + 41), 2 * limit + 1, MAX_TOKENS}
    for num_tokens in sizes:
        expected = "decode" if num_tokens <= limit else "prefill"
        assert bucket(with_tokens(problem, num_tokens)) == expected, num_tokens
    for num_tokens in (0, 1, limit, MAX_TOKENS):  # of the problem itself: ignored
        assert decode_limit(with_tokens(problem, num_tokens)) == limit


@pytest.mark.parametrize("num_tokens", [1, MAX_TOKENS])
def test_choose_refuses_a_gpu_without_a_kernel(num_tokens):
    with pytest.raises(PlanError) as error:
        choose(with_tokens(S1, num_tokens), GPUS["b200"])
    assert str(error.value) == "the kernel exists for sm_90a, the plan is for sm_100a"


def test_choose_refuses_a_gpu_of_small_shared_memory():
    with pytest.raises(PlanError, match="no ring of 3 stages fits 102,400 B of shared memory"):
        choose(S1, replace(H200, smem_bytes=102_400))


# Microseconds at 1, 8, 32, 128, 512, 2048 and 8192 tokens, worked out apart from this code and from
# the experts that one drawn routing hit: at 8 and 32 tokens the draw differs from the expectation.
FLOORS = [
    (S1, (75.9, 283, 304, 304, 306, 1002, 4009)),
    (S2, (8.1, 53.0, 115, 130, 131, 133, 430)),
    (S3, (75.9, 266, 304, 304, 305, 1002, 4009)),
    (S4, (32.5, 149, 174, 174, 175, 430, 1718)),
]


@pytest.mark.parametrize(("problem", "expected"), FLOORS)
def test_floor(problem, expected):
    floors = [floor(with_tokens(problem, 1 << n), H200) for n in (0, 3, 5, 7, 9, 11, 13)]
    for idx, (f, us) in enumerate(zip(floors, expected, strict=True)):
        assert f.us == pytest.approx(us, rel=0.07 if idx in (1, 2) else 0.01)
    assert floors[0].bound == "memory" and floors[-1].bound == "math"
    assert floor(with_tokens(problem, 0), H200).us == 0


# Plans.


def test_plan_by_hand():
    decode, prefill = (choose(with_tokens(S1, n), H200) for n in (1, 8192))
    assert (decode.block_tokens, prefill.block_tokens) == (64, 128)
    assert (decode.split_tokens, prefill.split_tokens) == (False, True)
    for plan in (decode, prefill):
        assert plan.num_threads == (512 if plan.bucket == "decode" else 384)
        assert (plan.num_k_blocks_1, plan.num_k_blocks_2) == (56, 16)
        assert (plan.num_tiles_1, plan.num_tiles_2) == (16, 28)
    registers = [32 * sum(r.num_warps * r.num_regs for r in p.roles) for p in (decode, prefill)]
    assert registers == [65_536, 64_512]


def test_ragged_intermediate_by_hand():
    plan = choose(MoeProblem(1, 384, 208, 4, 2), H200)
    assert (plan.num_k_blocks_1, plan.num_k_blocks_2) == (3, 2)
    assert (plan.num_tiles_1, plan.num_tiles_2) == (2, 2)
    constants = plan.constants
    assert (constants["up_block_offset"], constants["up_block_rest"]) == (1, 80)
    assert constants["mid_stride"] == 256
    assert all(type(value) in (int, bool) for value in constants.values())


def test_params_are_ordered_for_the_struct():
    params = choose(S1, H200).params
    sizes = [
        128 if p.ctype == "TensorMap" else 8 if p.ctype.endswith("*") or p.ctype == "i64" else 4
        for p in params
    ]
    assert sizes == sorted(sizes, reverse=True)  # no padding: maps, then 8 bytes, then 4
    assert len({p.name for p in params}) == len(params)


ROOMY = replace(H200, smem_bytes=1 << 20)


@pytest.mark.parametrize(
    ("changes", "gpu", "message"),
    [
        ({"arch": "sm_100a"}, H200, "kernel exists for sm_90a, the plan is for sm_100a"),
        ({"arch": "sm_100a"}, GPUS["b200"], "kernel exists for sm_90a, the plan is for sm_100a"),
        ({}, GPUS["b200"], "plan is for sm_90a, the B200 is sm_100a; plan again for it"),
        ({"num_stages": 9}, H200, r"shared memory is [\d,]+ B, the H200 has 232,448 B .* fewer"),
        ({"bucket": "medium"}, ROOMY, "bucket must be decode or prefill, got 'medium'"),
        ({"num_stages": 2}, H200, "the ring needs 3 stages .*, got 2"),
        ({"num_task_slots": 1}, H200, "needs 2 task slots, got 1"),
        ({"num_local_pairs": 65_536}, ROOMY, "16-bit pair numbers.*, got 65,536"),
        ({"num_local_pairs": 0}, H200, "16-bit pair numbers.*, got 0"),
        ({"unroll_k": 0}, H200, "unroll_k must be from 1 to 8, got 0"),
        ({"unroll_k": -4}, H200, "unroll_k must be from 1 to 8, got -4"),
        ({"unroll_k": 9}, H200, "unroll_k must be from 1 to 8, got 9"),
        ({"extra_tokens": 8}, H200, "extra_tokens must be 0, in prefill 8 or 16 .*, got 8"),
        ({"hidden": 7000}, H200, "hidden must be a multiple of 128 .*, got 7,000; pad"),
        ({"hidden": 16_512}, H200, "hidden must be a multiple .*, got 16,512; shard the layer"),
        ({"intermediate": 32_784}, H200, "intermediate must .*, got 32,784; shard the layer"),
        ({"num_experts": 1025}, H200, "num_experts must be .* to 1,024, got 1,025; shard"),
        ({"top_k": 1 << 20}, H200, "top_k must be .* from 1 to 32, got 1,048,576; split"),
        ({"math_regs": 240}, H200, "roles want 86,016 registers, a block .* gets 65,536; give"),
        ({"producer_regs": 20}, H200, "role load must be a multiple of 8 in 24..256, got 20"),
        ({"math_regs": 204}, H200, "role math must be a multiple of 8 in 24..256, got 204"),
    ],
)
def test_check_refuses(changes, gpu, message):
    plan = choose(S1, H200)
    plan.check(H200)
    with pytest.raises(PlanError, match=message):
        replace(plan, **changes).check(gpu)


@pytest.mark.parametrize(
    "changes",
    [
        {"unroll_k": 1},
        {"unroll_k": 8},
        {"num_local_pairs": 1},
        {"num_local_pairs": 65_535},
        {"num_stages": 3},
        {"num_task_slots": 2},
    ],
)
def test_check_accepts_its_limits(changes):
    replace(choose(S1, H200), **changes).check(ROOMY)


def test_extra_tokens_are_columns_of_one_multiply():
    prefill = choose(with_tokens(S1, 8192), H200)
    for num in (0, 8, 16):
        plan = replace(prefill, extra_tokens=num)
        plan.check(H200)
        assert plan.tile_tokens == 128 + num
    for num in (-8, 4, 12, 24):
        with pytest.raises(PlanError, match=f"extra_tokens must be .*, got {num}"):
            replace(prefill, extra_tokens=num).check(ROOMY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_100a"}, "kernel exists for"),
        ({"bucket": "medium"}, "bucket must be"),
        ({"hidden": 7000}, "hidden must be"),
        ({"num_stages": 2}, "needs 3 stages"),
        ({"num_task_slots": 1}, "needs 2 task slots"),
        ({"num_local_pairs": 65_536}, "16-bit pair numbers"),
        ({"unroll_k": 9}, "unroll_k must be"),
    ],
)
def test_check_looks_at_shared_memory_last(changes, message):
    """What a plan can never be is said first, on whatever GPU it would not fit."""
    with pytest.raises(PlanError, match=message):
        replace(choose(S1, H200), **changes).check(replace(H200, smem_bytes=1024))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([(3, 64)], "whole warpgroups of 4 warps, got 3 warps"),
        ([(4, 64), (1, 64)], "whole warpgroups of 4 warps, got 5 warps"),
        ([(4, 64), (2, 64), (2, 72)], r"warps 4..7 are one warpgroup .* got \[64, 64, 72, 72\]"),
        ([(4, 16)], "multiple of 8 in 24..256, got 16"),
        ([(4, 264)], "multiple of 8 in 24..256, got 264"),
        ([(4, 100)], "multiple of 8 in 24..256, got 100"),
        ([(4, 40), (8, 240)], "roles want 66,560 registers, a block of 384 threads gets 64,512"),
    ],
)
def test_check_roles_refuses(roles, message):
    with pytest.raises(PlanError, match=message):
        check_roles(tuple(Role(f"role_{i}", *role, "") for i, role in enumerate(roles)))


@pytest.mark.parametrize(
    "roles",
    [[(4, 24)], [(4, 248)], [(1, 40), (3, 40), (8, 232)], [(4, 88), (8, 208)], [(16, 128)]],
)
def test_check_roles_accepts(roles):
    check_roles(tuple(Role(f"role_{i}", *role, "") for i, role in enumerate(roles)))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 78, 114, 132, 144])
def test_few_first_tasks_are_spread(num_blocks):
    """The blocks of the first n tasks lie evenly among all blocks, for every n."""
    step = stride(num_blocks)
    order = [block * step % num_blocks for block in range(num_blocks)]
    assert sorted(order) == list(range(num_blocks))
    for n in range(1, num_blocks):
        taken = np.cumsum([task < n for task in order])
        even = np.arange(1, num_blocks + 1) * n / num_blocks
        assert np.abs(taken - even).max() < 3


def test_a_gpu_of_more_sms_than_counters_is_refused():
    with pytest.raises(PlanError, match="room for 144 blocks of a launch, the H200 has 145 SMs"):
        choose(S1, H200).check(replace(H200, num_sms=145))


BF16 = MoeProblem(1, 2880, 2880, 32, 4, "bf16")  # gpt-oss


def test_bf16_by_hand():
    problem = MoeProblem(3, 144, 208, 4, 2, "bf16")
    assert problem.expert_bytes == 2 * 3 * 144 * 208
    assert problem.activation_bytes == 3 * (2 * 144 + 8 * 2 + 2 * 144)
    plan = choose(problem, H200)
    assert (plan.format, plan.quantizes, plan.block_k, plan.block_k_bytes) == ("bf16", 0, 64, 128)
    assert (plan.num_k_blocks_1, plan.num_k_blocks_2) == (3, 4)
    fp8 = choose(replace(problem, hidden=256, format="fp8_block"), H200)
    for name in ("weight_tile_bytes", "token_tile_bytes", "block_k_bytes", "mid_stride"):
        assert plan.constants[name] == fp8.constants[name]
    assert (plan.constants["element_bytes"], fp8.constants["element_bytes"]) == (2, 1)


def test_no_gate_by_hand():
    """Two thirds of the bytes and FLOP; a tile of GEMM 1 is 256 channels."""
    for format, width in (("fp8_block", 1), ("fp8_channel", 1), ("fp8_tensor", 1), ("bf16", 2)):
        problem = MoeProblem(3, 256, 400, 4, 2, format, gated=False)
        scales = {"fp8_block": 4 * 2 + 2 * 4, "fp8_channel": 400 + 256, "fp8_tensor": 2}
        weights = 2 * 256 * 400
        assert problem.expert_bytes == width * weights + 4 * scales.get(format, 0)
        gated = replace(problem, gated=True)
        assert (problem.w13_rows, gated.w13_rows) == (400, 800)
        assert problem.flop == 6 * 2 * weights and 3 * problem.flop == 2 * gated.flop
        assert problem.activation_bytes == gated.activation_bytes
        plan = choose(problem, H200, activation="relu2_no_gate")
        with_gate = choose(gated, H200)
        assert (plan.num_tiles_1, with_gate.num_tiles_1) == (2, 4)
        assert plan.num_tiles_2 == with_gate.num_tiles_2
        same = {"gated": (0, 1), "tile_channels": (256, 128), "w13_rows": (400, 800)}
        same |= {"up_block_rest": (0, 16), "mid_stride": (512, 512)}
        for name, values in same.items():
            assert (plan.constants[name], with_gate.constants[name]) == values, name
    with pytest.raises(TypeError, match="gated must be True or False, got 1; pass a bool"):
        replace(problem, gated=1)


def test_bf16_memory():
    """Twice the bytes of a channel, no scales, and in decode no copy of x."""
    for num_tokens in (8, 8192):
        plan = choose(with_tokens(BF16, num_tokens), H200)
        sizes = {r.name: r.num_bytes for r in plan.scratch(num_tokens).regions}
        rows = plan.row_capacity(num_tokens)
        assert sizes["pool"] == (2 * 2880 * rows if plan.split_tokens else 0)
        assert sizes["mid"] == 2 * 2944 * rows
        assert sizes["pool_scale"] == sizes["mid_scale"] == 0


def test_bf16_plans():
    plans = plans_of_model(BF16, H200)
    assert {plan.bucket: plan.format for plan in plans.values()} == {
        "decode": "bf16",
        "prefill": "bf16",
    }
    assert plans == plans_of_model(with_tokens(BF16, 100), H200)
    assert decode_limit(BF16) == decode_limit(replace(BF16, hidden=2944, format="fp8_block"))
    assert plans["prefill"].unroll_k == 1


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_bf16_floor(gpu):
    """Twice the bytes; arithmetic at the rate of bf16."""
    fp8 = replace(S1, num_tokens=32)
    low, high = floor(fp8, gpu), floor(replace(fp8, format="bf16"), gpu)
    assert high.memory_us == pytest.approx(2 * low.memory_us, rel=1e-2)
    assert high.math_us == pytest.approx(low.math_us * gpu.fp8_tflops / gpu.bf16_tflops)
    assert 1.7 < gpu.fp8_tflops / gpu.bf16_tflops < 2


@pytest.mark.parametrize("hidden", [8, 100, 2888])
def test_bf16_refuses_ragged_rows(hidden):
    with pytest.raises(ValueError, match="hidden must be a multiple of 16 up to 16,384, got"):
        replace(BF16, hidden=hidden)


@pytest.mark.parametrize("format", ["fp8", None, "BF16", 3])
def test_unknown_formats_are_refused(format):
    with pytest.raises(ValueError, match="format must be one of fp8_block, .*, mxfp4_bf16, got"):
        replace(BF16, format=format)
    with pytest.raises(PlanError, match="format must be one of fp8_block, .*, mxfp4_bf16, got"):
        replace(choose(S1, H200), format=format).check(ROOMY)


def test_who_needs_the_whole_grid_in_bf16():
    """Few tokens do not, for they are read as they are."""
    decode, prefill = (choose(with_tokens(BF16, n), H200) for n in (8, 8192))
    most = decode.num_local_pairs // decode.top_k
    assert not decode.needs_whole_grid(most, x_is_bf16=True)
    assert decode.needs_whole_grid(most + 1, x_is_bf16=True)
    assert prefill.needs_whole_grid(1, x_is_bf16=True)


def test_who_needs_the_whole_grid():
    """Few quantised tokens do not: every block finds its own way."""
    decode = choose(replace(S1, num_tokens=8), H200)
    prefill = choose(replace(S1, num_tokens=2048), H200)
    most = decode.num_local_pairs // decode.top_k
    assert not decode.needs_whole_grid(most, x_is_bf16=False)
    assert decode.needs_whole_grid(most + 1, x_is_bf16=False)
    assert decode.needs_whole_grid(1, x_is_bf16=True)
    assert prefill.needs_whole_grid(1, x_is_bf16=False)


# MXFP4


MX = replace(S1, format="mxfp4_fp8")


def mx_prefill():
    return choose(with_tokens(MX, 8192), H200)


def test_buckets_of_mxfp4():
    """Beside e4m3 tokens fewer are in decode than of FP8, beside bf16 as many as of bf16."""
    limit = decode_limit(MX)
    loads = [with_tokens(MX, n).tokens_per_active_expert for n in (limit, limit + 1)]
    assert loads[0] <= W4A8_DECODE_TOKENS_PER_EXPERT < loads[1] and limit < decode_limit(S1)
    buckets = [choose(with_tokens(MX, n), H200).bucket for n in (0, 1, limit, limit + 1, 8192)]
    assert buckets == ["decode"] * 3 + ["prefill"] * 2
    in_bf16 = replace(MX, format="mxfp4_bf16")
    assert decode_limit(in_bf16) == decode_limit(replace(S1, format="bf16"))
    for problem in (MX, in_bf16):
        assert plans_of_model(problem, H200).keys() == {"decode", "prefill"}


@pytest.mark.parametrize("format", ["mxfp4_fp8", "mxfp4_bf16"])
def test_batch_invariant_plans_of_mxfp4_are_one(format):
    """Prefill would add up in another order; FP8 with block scales adds up in one."""
    counts = 1, 300, 8192
    problems = [replace(MX, num_tokens=n, format=format) for n in counts]
    plans = {choose(problem, H200, batch_invariant=True) for problem in problems}
    assert [plan.bucket for plan in plans] == ["decode"]
    assert plans_of_model(problems[0], H200, batch_invariant=True) == {"decode": plans.pop()}
    in_fp8 = [choose(replace(p, format="fp8_block"), H200, batch_invariant=True) for p in problems]
    assert in_fp8[-1].bucket == "prefill"


def test_who_expands_mxfp4():
    """Math warps in decode; in prefill warps of their own, between two rings."""
    decode, prefill = choose(MX, H200), mx_prefill()
    assert (decode.has_chunk_scales, decode.expands) == (True, False)
    assert (prefill.has_chunk_scales, prefill.expands) == (False, True)
    names = [role.name for role in prefill.roles]
    assert names == ["load", "schedule", "feed", "deliver", "expand", "math"]
    assert "expand" not in [role.name for role in decode.roles]
    sizes = {plan: {r.name: r.num_bytes for r in plan.smem.regions} for plan in (decode, prefill)}
    landing, num = 256 * 64, prefill.num_packed_stages
    assert sizes[decode]["weight_tiles"] == decode.num_stages * 2 * landing, "two groups of tokens"
    assert sizes[decode]["token_scales"] == decode.num_stages * 2 * 64 * 4
    assert sizes[prefill]["weight_tiles"] == prefill.num_stages * 2 * landing
    assert sizes[prefill]["packed_tiles"] == num * landing
    assert sizes[decode]["weight_scales"] == decode.num_stages * 2 * 512, "16 bits a row"
    assert sizes[prefill]["weight_scales"] == num * 512
    in_bf16 = choose(replace(MX, format="mxfp4_bf16"), H200)
    of_stages = {r.name: r.num_bytes for r in in_bf16.smem.regions}["weight_scales"]
    assert of_stages == in_bf16.num_stages * 1024, "a word a row"
    assert "packed_tiles" not in sizes[decode] and "landed" not in sizes[decode]


@pytest.mark.parametrize("format", ["mxfp4_fp8", "mxfp4_bf16"])
@pytest.mark.parametrize("hidden, intermediate", [(32, 32), (256, 384), (2880, 2880), (7168, 2048)])
def test_packed_scales_are_as_long_as_kernels_take_them(hidden, intermediate, format):
    """In both buckets, which share them."""
    problem = MoeProblem(1, hidden, intermediate, 3, 1, format)
    for plan in plans_of_model(problem, H200).values():
        for cols, rows, gate_up, number in (
            (hidden, 2 * intermediate, "gate_first", 1),
            (intermediate, hidden, None, 2),
        ):
            _, num_tiles, *tile = packed_shape(3, rows, cols, format, gate_up)
            constants = plan.derived_constants
            assert num_tiles == constants[f"num_tiles_{number}"]
            assert np.prod(tile) == constants[f"mx_tile_words_{number}"]
            landing = -(-cols // plan.landing_k) * constants["mx_words"]
            assert landing + constants["mx_row_words"] <= np.prod(tile), "no copy ends beyond"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_packed_stages": 1}, "num_packed_stages must be 2 or more for MXFP4 in .*, got 1"),
        ({"num_packed_stages": 0}, "num_packed_stages must be 2 or more for MXFP4 in .*, got 0"),
        ({"bucket": "decode"}, "num_packed_stages must be .* in prefill and else 0, got 3"),
        ({"num_stages": 1}, "the ring needs 2 stages for loads in flight, got 1"),
    ],
)
def test_check_of_both_rings(changes, message):
    with pytest.raises(PlanError, match=message):
        replace(mx_prefill(), **changes).check(ROOMY)


def test_both_rings_may_be_short():
    replace(mx_prefill(), num_stages=2, num_packed_stages=2).check(H200)
