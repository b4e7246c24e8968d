"""Region lists: offsets, alignment, order, totals; and the memories of every plan of a grid."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import SIZES, choose
from jitmoe.plan.memory_map import CTYPE_BYTES, LayoutError, MemoryMap, Region, align, ceil_div
from jitmoe.plan.problem import MAX_EXPERTS, MAX_TOKENS, MoeProblem

PLANS = [
    choose(MoeProblem(num_tokens, hidden, intermediate, num_experts, top_k), GPUS["h200"])
    for num_tokens, (hidden, intermediate, num_experts, top_k) in product(
        (1, MAX_TOKENS),
        (
            (7168, 2048, 32, 8),
            (2048, 768, 128, 8),
            (4096, 14336, 8, 2),
            (128, 16, 1, 1),
            (384, 208, 3, 2),
            (16384, 32768, MAX_EXPERTS, 32),
        ),
    )
]
TOKENS = (0, 1, 2, 7, 64, 65, 1000, 8192, MAX_TOKENS)


def check_layout(memory: MemoryMap):
    """Every region aligned, in order, without overlap, inside the total."""
    ends = [memory.offsets[region.name] + region.num_bytes for region in memory.regions]
    starts = list(memory.offsets.values())
    assert list(memory.offsets) == [region.name for region in memory.regions]
    assert starts[0] == 0
    for region, start in zip(memory.regions, starts, strict=True):
        assert start % region.align == 0 and start % CTYPE_BYTES[region.ctype] == 0
    for (end, start), region in zip(
        zip(ends, starts[1:], strict=False), memory.regions[1:], strict=True
    ):
        assert end <= start < end + region.align  # no overlap, no needless gap
    assert ends[-1] <= memory.num_bytes < ends[-1] + memory.align
    assert memory.num_bytes % memory.align == 0


def test_offsets_by_hand():
    memory = MemoryMap(
        (
            Region("a", "u8", (3,), 1),
            Region("b", "u32", (2, 5), 16),
            Region("c", "u64", (1,), 8),
            Region("d", "u16", (0,), 2),
            Region("e", "f32", (1,), 4),
        )
    )
    assert memory.offsets == {"a": 0, "b": 16, "c": 56, "d": 64, "e": 64}
    assert memory.align == 16 and memory.num_bytes == 80
    check_layout(memory)


def test_empty_map():
    memory = MemoryMap(())
    assert memory.offsets == {} and memory.num_bytes == 0 and memory.align == 1


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([Region("a", "u8", (1,)), Region("a", "u8", (1,))], r"unique, got \['a', 'a'\]"),
        ([Region("a", "f16", (1,))], "a: ctype must be one of .*'u8'.*, got 'f16'"),
        ([Region("a", "u8", (1,), 24)], "a: align must be a power of two .* got 24"),
        ([Region("a", "u64", (1,), 4)], "a: align must be .* at least the element's size, got 4"),
        ([Region("a", "u8", (1,), 0)], "a: align must be a power of two .* got 0"),
    ],
)
def test_impossible_lists_are_refused(regions, message):
    with pytest.raises(LayoutError, match=message):
        MemoryMap(tuple(regions))


def test_rounding():
    assert [ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [align(x, 16) for x in (0, 1, 16, 17)] == [0, 16, 16, 32]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.bucket}-{p.hidden}x{p.intermediate}")
def test_memories_of_plans(plan):
    check_layout(plan.smem)
    assert plan.smem.align == 1024  # the 128-byte swizzle repeats every 1024 bytes
    offsets = plan.smem.offsets
    assert offsets["weight_tiles"] % 1024 == 0 == offsets["token_tiles"] % 1024
    for num_tokens in TOKENS:
        for memory in (plan.scratch(num_tokens), plan.control(num_tokens)):
            check_layout(memory)
            # Regions follow each other in one workspace and are tensor-map and vector aligned.
            assert memory.num_bytes % 256 == 0
            assert all(offset % 256 == 0 for offset in memory.offsets.values())


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.bucket}-{p.hidden}x{p.intermediate}")
def test_shared_memory_is_used_up_by_stages(plan):
    limit = GPUS["h200"].smem_bytes
    assert plan.smem.num_bytes <= limit
    stage_bytes = plan.block_k_bytes * (plan.block_rows + plan.tile_tokens)
    assert stage_bytes * plan.num_stages <= plan.smem.num_bytes
    if plan.num_stages < SIZES[plan.bucket][0][0]:
        assert replace(plan, num_stages=plan.num_stages + 1).smem.num_bytes > limit


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.bucket}-{p.hidden}x{p.intermediate}")
def test_workspace_bytes(plan):
    sizes = [plan.workspace_bytes(num_tokens) for num_tokens in TOKENS]
    assert all(small <= big for small, big in pairwise(sizes)) and sizes[0] > 0
    num_tokens = 8192
    pairs = num_tokens * plan.top_k
    needed = num_tokens * plan.hidden  # x_quant
    needed += pairs * (plan.intermediate + 2 * plan.hidden)  # mid and slices
    assert needed < plan.workspace_bytes(num_tokens) < 1.6 * needed + (64 << 20)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.bucket}-{plan.hidden}")
def test_regions_hold_what_is_indexed(plan):
    constants = plan.constants
    assert constants["mid_stride"] >= plan.intermediate and constants["mid_stride"] % 128 == 0
    assert constants["x_quant_scale_stride"] >= plan.num_k_blocks_1
    for num_tokens in TOKENS:
        shapes = {region.name: region.shape for region in plan.scratch(num_tokens).regions}
        pairs, rows = max(num_tokens, 1) * plan.top_k, plan.row_capacity(num_tokens)
        # Every expert may start a gap later, and a tile is read from any row to its end.
        assert rows >= pairs + plan.num_experts * (plan.row_align - 1) + plan.block_tokens
        assert rows % 4 == 0  # scales of every group start at 16 bytes
        assert shapes["mid"] == (rows, constants["mid_stride"])
        assert shapes["mid_scale"] == (plan.num_k_blocks_2, rows)
        assert shapes["row_pairs"] == (rows, 1 + plan.split_tokens)
        assert shapes["slices"] == (pairs, plan.hidden)
        if plan.split_tokens:
            assert shapes["pool"] == (rows, plan.hidden)
            assert shapes["pool_scale"] == (plan.num_k_blocks_1, rows)
        else:
            assert shapes["pool"] == (max(num_tokens, 1), plan.hidden)
        # A block per started 64 or 128 pairs of each expert, and a counter per expert.
        full_blocks = num_tokens * plan.top_k // plan.block_tokens
        assert plan.bank_words(num_tokens) >= 2 * plan.num_experts + full_blocks
        assert plan.bank_words(num_tokens) % 32 == 0
