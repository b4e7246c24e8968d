"""Logical experts with replicas on several ranks, emulated: where ids go, and what y they give."""

import numpy as np
import pytest
from test_emulate import make_plan

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.emulate.ranks import EmulatedRanks
from jitmoe.reference import Layer
from jitmoe.reference_expert_map import replicas_of

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

HIDDEN, INTERMEDIATE, TOP_K = 256, 128, 2


def lay_out(replicas, num_experts, seed):
    """A map of as many replicas as each logical expert has, on random experts of all ranks."""
    rng = np.random.default_rng(seed)
    expert_map = np.full((len(replicas), max(replicas)), -1, np.int32)
    used = np.arange(expert_map.shape[1]) < np.array(replicas)[:, None]
    expert_map[used] = rng.permutation(num_experts)[: sum(replicas)]
    return expert_map


class Ranks:
    """A layer of logical experts, shared out by a map; spare experts have other weights."""

    def __init__(self, bucket, num_ranks, replicas, room, seed=0, experts_each=3, **fields):
        checked = fields.pop("checked", False)
        num_experts = num_ranks * experts_each
        self.expert_map = lay_out(replicas, num_experts, seed)
        sizes = HIDDEN, INTERMEDIATE
        layer = reference.random_layer(len(replicas) + 1, *sizes, seed)
        logical = np.full(num_experts, len(replicas))
        for number, row in enumerate(self.expert_map):
            logical[row[row >= 0]] = number
        self.logical, self.physical = (
            Layer(*(part[rows] for part in layer)) for rows in (slice(len(replicas)), logical)
        )
        shares = [
            Layer(*(part[first : first + experts_each] for part in self.physical))
            for first in range(0, num_experts, experts_each)
        ]
        self.counts = np.zeros((num_ranks, experts_each), np.int32)
        plan = make_plan(bucket, *sizes, experts_each, TOP_K, num_ranks=num_ranks, **fields)
        options = {"num_blocks": 2, "checked": checked, "expert_counts": list(self.counts)}
        self.emulated = EmulatedRanks(plan, shares, room, **options)
        self.wanted = np.zeros(num_experts, np.int64)  # counts of all launches

    def tokens(self, counts, routing="unused", seed=1):
        sizes = HIDDEN, len(self.expert_map), TOP_K
        return [
            reference.random_tokens(num, *sizes, seed + 97 * rank, routing)
            for rank, num in enumerate(counts)
        ]

    def check(self, tokens, dtype=np.int32, seed=0):
        """One launch, and what each expert was given; returns y of each rank."""
        calls = [(fp8.encode_bf16(t.x), t.topk_ids.astype(dtype), t.topk_weights) for t in tokens]
        ys = self.emulated(calls, seed=seed, expert_map=self.expert_map)
        for rank, (y, each) in enumerate(zip(ys, tokens, strict=True)):
            experts = replicas_of(each.topk_ids, self.expert_map, rank, len(self.wanted))
            self.wanted += np.bincount(experts[experts >= 0], minlength=len(self.wanted))
            if not len(y):
                continue
            x = fp8.quantize_tokens(each.x)
            ref = self.oracle(x, experts, each, self.physical)
            assert np.array_equal(ref, self.oracle(x, each.topk_ids, each, self.logical))
            assert reference.relative_error(y, ref) < 1e-2
            assert reference.worst_element(y, ref) < 0.25
        assert np.array_equal(self.counts.ravel(), self.wanted)
        return ys

    @staticmethod
    def oracle(x, ids, tokens, layer):
        return reference.mega_moe(*x, ids, tokens.topk_weights, *layer, requantize=True)


def test_the_rule():
    """Turns by token, ranks a turn apart; rows end before what is no expert."""
    expert_map = np.array([[3, -1, -1], [0, 5, 7], [-1, 4, -1], [1, 8, 2]], np.int32)
    ids = np.array([[0, 1, 1], [1, 2, 3], [1, 4, -1], [1, 0, 1 << 20]])
    wanted = [[3, 0, 0], [5, -1, 1], [7, -1, -1], [0, 3, -1]]
    assert replicas_of(ids, expert_map, 0, 8).tolist() == wanted
    assert replicas_of(ids, expert_map, 2, 8)[:, 0].tolist() == [3, 0, 5, 7]
    for rank in range(3):
        turns = replicas_of(np.ones((12, 1), np.int64), expert_map, rank, 8)
        assert [(turns == expert).sum() for expert in (0, 5, 7)] == [4, 4, 4]


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
@pytest.mark.parametrize(
    "replicas, counts",
    [((1, 2, 1, 2), (5, 3)), ((3, 1, 2), (4, 0, 7)), ((2, 3, 1, 1, 2, 3), (6, 1, 3, 2))],
    ids=str,
)
def test_against_the_oracle(bucket, replicas, counts):
    ranks = Ranks(bucket, len(counts), replicas, room=8)
    for seed, dtype in enumerate((np.int32, np.int64)):
        ranks.check(ranks.tokens(counts, seed=seed + 1), dtype, seed)


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
def test_bits_are_those_of_logical_experts_on_one_rank(bucket):
    options = {"batch_invariant": True, "presum": False}
    ranks = Ranks(bucket, 2, (3, 1, 2), room=9, **options)
    tokens = ranks.tokens((9, 4))
    ys = np.concatenate(ranks.check(tokens))
    plan = make_plan(bucket, HIDDEN, INTERMEDIATE, 3, TOP_K, batch_invariant=True)
    x, ids, router = (np.concatenate(part) for part in list(zip(*tokens, strict=True))[:3])
    assert np.array_equal(
        ys, EmulatedLayer(plan, ranks.logical, 13, 2)(fp8.encode_bf16(x), ids, router)
    )


def test_ids_of_a_token_that_repeat_are_one_expert_twice():
    ranks = Ranks("decode", 2, (3, 2), room=6)
    tokens = ranks.tokens((6, 5), "duplicates")
    assert any((each.topk_ids[:, 0] == each.topk_ids[:, 1]).any() for each in tokens)
    ranks.check(tokens)


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
def test_experts_without_a_replica_and_rows_that_end_early(bucket):
    ranks = Ranks(bucket, 2, (3, 1, 2), room=6)
    ranks.expert_map[0, 1] = 6  # past the last expert: of this row one replica is left
    ranks.expert_map[2] = -1
    tokens = ranks.tokens((6, 5), "uniform")
    for each in tokens:
        each.topk_weights[each.topk_ids == 2] = 0  # as the oracle of logical experts sees them
    ranks.check(tokens)


def test_another_map_for_every_launch():
    ranks = Ranks("decode", 2, (2, 2, 2), room=6)
    for seed in range(3):
        ranks.expert_map = np.roll(ranks.expert_map, 1, axis=1)
        ranks.check(ranks.tokens((6, 2), seed=seed), seed=seed)


def test_without_a_map_counts_are_those_of_all_ranks_tokens():
    ranks = Ranks("decode", 2, (1,) * 6, room=6)
    tokens = ranks.tokens((6, 3))
    ranks.emulated([(fp8.encode_bf16(t.x), t.topk_ids, t.topk_weights) for t in tokens])
    ids = np.concatenate([each.topk_ids.ravel() for each in tokens])
    assert np.array_equal(
        ranks.counts.ravel(), np.bincount(ids[(ids >= 0) & (ids < 6)], minlength=6)
    )


@pytest.mark.parametrize("bucket", ["decode", "prefill"])
def test_checked(bucket):
    ranks = Ranks(bucket, 2, (1, 2, 1), room=4, checked=True)
    ranks.check(ranks.tokens((4, 3)))
