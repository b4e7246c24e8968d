"""Ranks with a share of the experts each, emulated, against the oracle on all experts."""

from functools import cache

import numpy as np
import pytest

from jitmoe import fp8, reference
from jitmoe.emulate.mega_moe import Call, EmulatedLayer
from jitmoe.emulate.ranks import EmulatedRanks
from jitmoe.plan.formats import format_of
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MoeProblem
from jitmoe.reference import Layer
from jitmoe.reference_biases import Biases, random_biases

HIDDEN, INTERMEDIATE = 256, 160  # a tile of GEMM 1 and a ragged one
BUCKETS = ("decode", "prefill")


@cache
def plan_of(bucket, num_ranks, experts_each=2, top_k=2, format="fp8_block", **fields):
    """As a GPU would run it; rows are summed before they travel unless it is said."""
    problem = MoeProblem(1, HIDDEN, INTERMEDIATE, experts_each, top_k, format)
    fields = {"num_ranks": num_ranks, "presum": True} | fields
    return plans_of_model(problem, GPUS["h200"], **fields)[bucket]


@cache
def layer_of(num_experts, format="fp8_block") -> Layer:
    return reference.random_layer(num_experts, HIDDEN, INTERMEDIATE, seed=3, format=format)


def share(parts, rank: int, num: int):
    """Of a rank, which has `num` of the experts."""
    return type(parts)(*(p if p is None else p[rank * num :][:num] for p in parts))


class Ranks:
    """A group of ranks and the whole layer, whose tokens are drawn at each call."""

    def __init__(self, plan: MegaMoePlan, room=8, routing="uniform", biases=None, **options):
        self.plan, self.routing, self.biases = plan, routing, biases
        self.num_experts = plan.num_ranks * plan.num_experts
        self.layer = layer_of(self.num_experts, plan.format)
        ranks, each = range(plan.num_ranks), plan.num_experts
        if biases is not None:
            options["biases"] = [share(biases, rank, each) for rank in ranks]
        layers = [share(self.layer, rank, each) for rank in ranks]
        self.emulated = EmulatedRanks(plan, layers, room, **{"num_blocks": 2} | options)

    def draw(self, counts, seed=0) -> list[reference.Tokens]:
        sizes = HIDDEN, self.num_experts, self.plan.top_k
        seeds = (1000 * seed + rank for rank in range(len(counts)))
        return [
            reference.random_tokens(n, *sizes, s, self.routing)
            for n, s in zip(counts, seeds, strict=True)
        ]

    def calls(self, tokens, x_is_fp8=False) -> list[Call]:
        encode = fp8.quantize_tokens if x_is_fp8 else fp8.encode_bf16
        return [Call(encode(each.x), *each[1:]) for each in tokens]

    def check(self, ys, tokens) -> None:
        for y, (x, ids, weights) in zip(ys, tokens, strict=True):
            scale = None
            if format_of(self.plan.format).quantizes:
                x, scale = fp8.quantize_tokens(x)
            options = self.biases.arguments if self.biases else {}
            options |= {"requantize": True, "format": self.plan.format}
            ref = reference.mega_moe(x, scale, ids, weights, *self.layer, **options)
            # Ranks' sums travel in bf16: a second rounding.
            most = 6e-3 if self.plan.presum else 4e-3
            assert reference.relative_error(y, ref) < most
            assert reference.worst_element(y, ref) < (0.25 if self.biases else 0.06)

    def run(self, counts, seed=0, x_is_fp8=False, **options) -> list[np.ndarray]:
        """One launch, checked."""
        tokens = self.draw(counts, seed)
        ys = self.emulated(self.calls(tokens, x_is_fp8), seed=seed, **options)
        self.check(ys, tokens)
        return ys


@pytest.mark.parametrize("presum", [True, False])
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(
    "counts", [(5, 3), (7, 0, 33), (1, 70, 0, 12), (4, 1, 0, 2, 9, 0, 3, 30)], ids=str
)
def test_numbers_of_ranks(counts, bucket, presum):
    """Of which some have one token and some none."""
    plan = plan_of(bucket, len(counts), presum=presum)
    Ranks(plan, room=max(counts)).run(counts, seed=len(counts))


FORMATS = ("fp8_channel", "fp8_tensor", "bf16", "mxfp4_bf16")


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, bucket):
    """Sums here and there by turns; prefill has tiles of both kinds."""
    presum = FORMATS.index(format) % 2 == BUCKETS.index(bucket)
    plan = plan_of(bucket, 2, format=format, presum=presum)
    Ranks(plan, room=90).run((9, 3) if bucket == "decode" else (90, 40), seed=1)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_routings(routing, bucket):
    """One expert's rank gets all tokens, and the others none."""
    ranks = Ranks(plan_of(bucket, 3, experts_each=3, top_k=4), room=40, routing=routing)
    ranks.run((40, 1, 17), seed=2)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("presum", [True, False])
@pytest.mark.parametrize("top_k", [1, 8, 17])
def test_slots_of_a_token(top_k, presum, bucket):
    routing = "uniform" if top_k == 1 else "duplicates"
    plan = plan_of(bucket, 2, experts_each=5, top_k=top_k, presum=presum)
    Ranks(plan, room=20, routing=routing).run((20, 7), seed=3)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_one_expert_each(bucket):
    Ranks(plan_of(bucket, 4, experts_each=1, top_k=1), room=9).run((9, 0, 3, 1), seed=4)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_bound_below_the_room(bucket):
    """Launches in a row, whose bound is what they have, or more, up to the room."""
    ranks = Ranks(plan_of(bucket, 3), room=50)
    for seed, (counts, bound) in enumerate(
        [((5, 3, 0), 5), ((5, 3, 1), 20), ((0, 0, 0), 1), ((0, 0, 50), None), ((2, 9, 4), 11)]
    ):
        ranks.run(counts, seed, rank_tokens=bound)


@pytest.mark.parametrize("presum", [True, False])
def test_buckets_take_turns(presum):
    """In one symmetric memory, whose flags and banks go on from one kernel's launch to the next."""
    few = Ranks(plan_of("decode", 3, presum=presum), room=60)
    many = Ranks(plan_of("prefill", 3, presum=presum), room=60, beside=few.emulated)
    turns = [few, many, many, few, few, few, many, few]
    for seed, ranks in enumerate(turns):
        counts = np.random.default_rng(seed).integers(0, 60 if ranks is many else 9, 3)
        ranks.run(counts, seed)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_tokens_in_fp8_give_the_same_bits(bucket):
    ranks = Ranks(plan_of(bucket, 3), room=33)
    for y, other in zip(ranks.run((7, 0, 33)), ranks.run((7, 0, 33), x_is_fp8=True), strict=True):
        assert np.array_equal(y, other)


def test_wide_ids_and_weights_in_bf16():
    ranks = Ranks(plan_of("decode", 3), routing="unused")
    tokens = ranks.draw((8, 2, 5), seed=5)
    tokens = [each._replace(topk_weights=fp8.round_bf16(each.topk_weights)) for each in tokens]
    calls = [
        call._replace(
            topk_ids=call.topk_ids.astype(np.int64) + (call.topk_ids < 0) * (1 << 32),
            topk_weights=fp8.encode_bf16(call.topk_weights),
        )
        for call in ranks.calls(tokens)
    ]
    ranks.check(ranks.emulated(calls), tokens)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_biases(bucket):
    plan = plan_of(bucket, 2, has_bias=True)
    biases: Biases = random_biases(4, HIDDEN, INTERMEDIATE, seed=6)
    ranks = Ranks(plan, room=20, biases=biases)
    ys = ranks.run((5, 20), seed=6)
    ranks.biases = None
    with pytest.raises(AssertionError):
        ranks.check(ys, ranks.draw((5, 20), seed=6))


@pytest.mark.parametrize("format", ["fp8_block", "bf16"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_bits_are_those_of_one_rank_with_all_experts(bucket, format):
    """Unless rows are summed before they travel; tiles in parts would depend on their number."""
    fields = {"format": format, "presum": False, "batch_invariant": True}
    ranks = Ranks(plan_of(bucket, 4, top_k=3, **fields), room=50)
    counts = (50, 0, 1, 30)
    tokens, ys = ranks.draw(counts, 7), ranks.run(counts, 7)
    together = [np.concatenate(part) for part in zip(*tokens, strict=True)]
    whole = plan_of(bucket, 1, experts_each=8, top_k=3, format=format, batch_invariant=True)
    alone = EmulatedLayer(whole, ranks.layer, sum(counts), num_blocks=3)
    y = alone(fp8.encode_bf16(together[0]), *together[1:], seed=8)
    assert np.array_equal(np.concatenate(ys), y)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_seed_and_grid_gives_the_same_bits(bucket):
    plan, counts = plan_of(bucket, 3, top_k=4), (20, 1, 40)
    first = Ranks(plan, room=40)
    tokens = first.draw(counts)
    ys = first.emulated(first.calls(tokens))
    for num_blocks in (1, 3):
        other = Ranks(plan, room=45, num_blocks=num_blocks)
        for seed in (9, 10):
            again = other.emulated(other.calls(tokens), seed=seed)
            assert all(np.array_equal(a, b) for a, b in zip(again, ys, strict=True))


@pytest.mark.parametrize("presum", [True, False])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_no_races(bucket, presum):
    """Launches one after the other, in the checked build."""
    ranks = Ranks(plan_of(bucket, 3, presum=presum, top_k=3), room=40, checked=True)
    for seed, counts in enumerate([(3, 0, 40), (7, 2, 1), (0, 12, 5)]):
        ranks.run(counts, seed)


@pytest.mark.parametrize("presum", [True, False])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_ranks_drift_apart(bucket, presum):
    """Launches in a row, of which a rank may be in the next while others are in the last."""
    ranks = Ranks(plan_of(bucket, 3, presum=presum), room=30)
    sizes = [(3, 0, 30), (7, 2, 1), (0, 12, 5)]
    rounds = [ranks.draw(counts, seed) for seed, counts in enumerate(sizes)]
    calls = [ranks.calls(tokens) for tokens in rounds]
    for seed in range(8):
        for ys, tokens in zip(
            ranks.emulated.run(calls, seed=seed, delays=True), rounds, strict=True
        ):
            ranks.check(ys, tokens)


# Numbers of `enum Wait`: of routing, tokens and rows of other ranks.
WAIT_PAIRS, WAIT_TOKENS, WAIT_EXPERT = 15, 16, 17


@pytest.mark.parametrize("bucket", BUCKETS)
def test_who_waits_for_a_killed_rank_says_so(bucket):
    """Or for a rank that gave up for its sake. Nobody waits for anything else."""
    plan, seen = plan_of(bucket, 3), set()
    for step in (1, 1000, *range(40_000, 340_000, 60_000)):
        ranks = Ranks(plan, room=12, num_blocks=1)
        calls = [ranks.calls(ranks.draw((12, 5, 9)))] * 2
        ranks.emulated.run(calls, kill=(1, step), expire=True)
        statuses = [rank.status for rank in ranks.emulated.ranks]
        assert not statuses[1].any()
        named = set()
        for given_up, wait, _, _, index, *_ in statuses[0], statuses[2]:
            assert given_up == 1 and wait in (WAIT_PAIRS, WAIT_TOKENS, WAIT_EXPERT)
            named.add(index // plan.num_experts if wait == WAIT_EXPERT else index)
            seen.add(int(wait))
        assert 1 in named
    assert {WAIT_PAIRS, WAIT_EXPERT} <= seen


@pytest.mark.parametrize("bucket", BUCKETS)
def test_bounds_that_differ_are_noticed_by_the_kernel(bucket):
    ranks = Ranks(plan_of(bucket, 3), room=16)  # tables overlap then, a race before it is noticed
    tokens = ranks.draw((5, 8, 3))
    ranks.emulated(ranks.calls(tokens), rank_tokens=[8, 16, 8], expire=True)
    said = [tuple(map(int, each.status[[0, 1, 4, 5]])) for each in ranks.emulated.ranks]
    assert (1, 18, 1, 16) in said, "kWaitBound, of rank 1, which has 16"
    assert all(status[0] == 1 for status in said), "no rank takes tables that mean something else"
