"""Bytes over links, by hand and in expectation."""

from dataclasses import replace

import numpy as np
import pytest

from jitmoe import reference
from jitmoe.bench.points import SHAPES
from jitmoe.links import (
    Links,
    counted_links,
    expected_links,
    mean_links,
    row_bytes,
    table_bytes,
    token_bytes,
)
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem

LAYER = MoeProblem(3, 256, 128, 2, 2)  # of each of two ranks: experts 0 and 1, 2 and 3
TOKEN, ROW, TABLES = 256 + 2 * 4, 512, 3 * 2 * 8


@pytest.mark.parametrize("format, num_bytes", [("fp8_block", 264), ("mxfp4_fp8", 264)])
def test_tokens_in_e4m3_bring_scales(format, num_bytes):
    assert token_bytes(replace(LAYER, format=format)) == num_bytes


def test_tokens_in_bf16_are_as_wide_as_rows():
    for format in ("bf16", "mxfp4_bf16"):
        layer = replace(LAYER, format=format)
        assert token_bytes(layer) == row_bytes(layer) == 512


def test_tokens_are_those_that_a_plan_stages():
    for format in ("fp8_block", "bf16"):
        layer = replace(SHAPES["S1"], num_tokens=5, format=format)
        plan = choose(layer, GPUS["h200"], num_ranks=8)
        sizes = {r.name: r.num_bytes for r in plan.symmetric(5).regions}
        assert sizes["staged_x"] + sizes["staged_scale"] == 2 * 5 * token_bytes(layer)
        assert sizes["slots"] == 5 * 8 * row_bytes(layer)
        tables = sizes["pair_experts"] + sizes["pair_weights"]  # two banks, the own part too
        assert tables == 2 * (table_bytes(layer, 8) * 8 // 7)


def test_by_hand():
    """Rank 0: a token for two remote experts, one for its own, one for each. Rank 1: one token, the
    other slot of which is unused.
    """
    ids = [np.array([[2, 3], [0, 1], [1, 3]]), np.array([[0, -1]])]
    first, second = counted_links(LAYER, ids)
    assert first == Links(3 * TOKEN + ROW, 2 * TOKEN + ROW, 2 * TOKEN + ROW, TABLES)
    assert second == Links(TOKEN + 3 * ROW, TOKEN + 3 * ROW, TOKEN + 2 * ROW, TABLES)
    assert first.moved(presum=True) == 2 * TOKEN + ROW + TABLES
    assert second.moved(presum=False) == TOKEN + 3 * ROW + TABLES
    both = mean_links([first, second])
    assert (both.pairs, both.once) == (2 * TOKEN + 2 * ROW, 1.5 * TOKEN + 2 * ROW)
    assert (both.presum, both.tables) == (1.5 * TOKEN + 1.5 * ROW, TABLES)


def test_unused_slots_and_no_tokens_send_tables_alone():
    none = np.zeros((0, 2), np.int32)
    for links in counted_links(LAYER, [np.array([[4, -1], [9, 4]]), none]):
        assert links == Links(0.0, 0.0, 0.0, TABLES) and links.saved == 0.0


@pytest.mark.parametrize("num_ranks, per_rank", [(2, 4), (8, 1), (8, 32)])
def test_expected_is_what_uniform_routing_gives(num_ranks, per_rank):
    layer = MoeProblem(2000, 256, 128, per_rank, 4)
    sizes = 256, num_ranks * per_rank, 4
    ids = [reference.random_tokens(2000, *sizes, seed).topk_ids for seed in range(num_ranks)]
    counted, expected = mean_links(counted_links(layer, ids)), expected_links(layer, num_ranks)
    for name, value in vars(expected).items():
        assert getattr(counted, name) == pytest.approx(value, rel=0.02)


def test_what_deepseek_v3_on_eight_ranks_saves():
    """0.656 of the bytes of pairs where slots are drawn one by one; distinct experts meet a little
    less on a rank.
    """
    layer = replace(SHAPES["S1"], num_tokens=512)
    links = expected_links(layer, 8)
    assert 1 - (7 / 8) ** 8 < links.presum / links.pairs < 0.67
    assert links.moved(presum=True) / links.pairs <= 0.70
    assert links.presum < links.once < links.pairs
    sizes = 128, 256, 8
    ids = [reference.random_tokens(512, *sizes, seed).topk_ids for seed in range(8)]
    for of_rank in counted_links(layer, ids):
        assert of_rank.moved(presum=True) / of_rank.pairs <= 0.70


def test_more_slots_than_experts_are_refused():
    with pytest.raises(ValueError, match="top_k must be up to the 4 experts of all ranks"):
        expected_links(replace(LAYER, top_k=5), 2)
