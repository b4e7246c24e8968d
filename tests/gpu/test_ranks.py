"""Many ranks: against the oracle, and against one rank with all experts."""

from __future__ import annotations

from functools import cache

import pytest

from jitmoe import ExpertWeights, GroupWorkspace, LocalGroup, mega_moe, reference
from jitmoe.fp8 import encode_bf16, quantize_tokens
from jitmoe.plan.formats import format_of
from jitmoe.reference_expert_map import replicas_of

HIDDEN, INTERMEDIATE, TOP_K = 1024, 512, 4


@cache
def make_layer(num_experts, format="fp8_block", hidden=HIDDEN, intermediate=INTERMEDIATE):
    import cupy

    return reference.random_layer(num_experts, hidden, intermediate, 3, xp=cupy, format=format)


def weights_of(layer, format="fp8_block", first=0, num=None):
    """Of some experts of a layer: views of the same memory."""
    parts = layer.w13, layer.w2, layer.w13_scale, layer.w2_scale
    parts = [part if part is None else part[first:][:num] for part in parts]
    return ExpertWeights(*parts, format=format if format_of(format).is_mx else None)


class Ranks:
    """A layer shared out to the ranks of a LocalGroup, and the whole of it on one."""

    def __init__(self, num_ranks, experts_each=4, format="fp8_block", top_k=TOP_K, **sizes):
        self.group = LocalGroup(num_ranks)
        self.workspace = GroupWorkspace(self.group, timeout_s=20)
        self.format, self.top_k = format, top_k
        self.num_experts = num_ranks * experts_each
        self.layer = make_layer(self.num_experts, format, **sizes)
        self.whole = weights_of(self.layer, format)
        self.shares = [
            weights_of(self.layer, format, rank * experts_each, experts_each)
            for rank in range(num_ranks)
        ]

    def tokens(self, counts, routing="uniform", seed=1):
        import cupy

        sizes = self.whole.hidden, self.num_experts, self.top_k
        return [
            reference.random_tokens(num, *sizes, seed + 97 * rank, routing, cupy)
            for rank, num in enumerate(counts)
        ]

    def run(self, tokens, x=None, **options):
        """One call, with poison in what it writes to."""
        import cupy

        for workspace in self.workspace.workspaces:
            if workspace.scratch is not None:
                workspace.scratch.fill(0xFF)
        x = x or [encode_bf16(each.x, cupy) for each in tokens]
        out = [cupy.full(each.x.shape, 0xFFFF, cupy.uint16) for each in tokens]
        ids, router = [t.topk_ids for t in tokens], [t.topk_weights for t in tokens]
        options = {"group": self.group, "workspace": self.workspace} | options
        returned = mega_moe(x, ids, router, self.shares, out=out, **options)
        cupy.cuda.Device().synchronize()
        self.workspace.check()
        assert all(a is b for a, b in zip(returned, out, strict=True))
        return out

    def check(self, ys, tokens):
        import cupy

        for y, each in zip(ys, tokens, strict=True):
            if not len(each.x):
                continue
            if format_of(self.format).quantizes:
                x = quantize_tokens(each.x, cupy)
            else:
                x = encode_bf16(each.x, cupy), None
            routing = each.topk_ids, each.topk_weights
            options = {"requantize": True, "format": self.format, "xp": cupy}
            ref = reference.mega_moe(*x, *routing, *self.layer, **options)
            assert reference.relative_error(y, ref, cupy) < (1e-2 if ref.size > 1 << 12 else 4e-2)
            assert reference.worst_element(y, ref, cupy) < 0.25


@pytest.mark.parametrize("presum", [True, False])
@pytest.mark.parametrize(
    "counts", [(9, 3), (1, 0, 64, 7), (300,) * 4, (5,) * 8, (700,) * 8], ids=str
)
def test_against_the_oracle(counts, presum):
    ranks = Ranks(len(counts))
    tokens = ranks.tokens(counts)
    ranks.check(ranks.run(tokens, presum=presum), tokens)


@pytest.mark.parametrize("format", ["fp8_channel", "bf16", "mxfp4_bf16"])
@pytest.mark.parametrize("num_tokens", [7, 600])
def test_formats(format, num_tokens):
    ranks = Ranks(4, format=format)
    tokens = ranks.tokens((num_tokens,) * 4)
    ranks.check(ranks.run(tokens), tokens)


@pytest.mark.parametrize("routing", ["zipf", "one_expert", "unused"])
@pytest.mark.parametrize("num_tokens", [24, 500])
def test_routings(routing, num_tokens):
    ranks = Ranks(4)
    tokens = ranks.tokens((num_tokens, 0, num_tokens, 1), routing)
    ranks.check(ranks.run(tokens), tokens)


@pytest.mark.parametrize("num_tokens", [1, 40, 400])
def test_bits_are_those_of_one_rank_with_all_experts(num_tokens):
    """Unless rows are summed before they travel; tiles in parts would depend on their number."""
    import cupy

    ranks = Ranks(4)
    tokens = ranks.tokens((num_tokens,) * 4)
    ys = ranks.run(tokens, presum=False, batch_invariant=True)
    x = encode_bf16(cupy.concatenate([each.x for each in tokens]), cupy)
    ids = cupy.concatenate([each.topk_ids for each in tokens])
    router = cupy.concatenate([each.topk_weights for each in tokens])
    whole = mega_moe(x, ids, router, ranks.whole, batch_invariant=True)
    assert bool((cupy.concatenate(ys) == whole.view(cupy.uint16)).all())


def test_tokens_in_fp8_give_the_same_bits():
    import cupy

    ranks = Ranks(2)
    tokens = ranks.tokens((50, 20))
    ys = ranks.run(tokens)
    again = ranks.run(tokens, x=[quantize_tokens(each.x, cupy) for each in tokens])
    assert all(bool((a == b).all()) for a, b in zip(ys, again, strict=True))


def test_a_thousand_random_launches():
    """Without any wait between them, in both buckets by turns, ranks of many sizes."""
    import cupy
    import numpy as np

    rng = np.random.default_rng(7)
    ranks = Ranks(4)
    few, many = ranks.tokens((40,) * 4, seed=11), ranks.tokens((600,) * 4, seed=12)
    wanted = {id(t): ranks.run(t) for t in (few, many)}
    runs = []
    for _ in range(1000):
        tokens = few if rng.random() < 0.8 else many
        counts = [int(rng.integers(0, len(each.x) + 1)) for each in tokens]
        out = [cupy.full((n, HIDDEN), 0xFFFF, cupy.uint16) for n in counts]
        parts = [
            (encode_bf16(each.x[:n], cupy), each.topk_ids[:n], each.topk_weights[:n])
            for each, n in zip(tokens, counts, strict=True)
        ]
        x, ids, router = map(list, zip(*parts, strict=True))
        options = {"group": ranks.group, "workspace": ranks.workspace, "out": out}
        bound = len(tokens[0].x)
        mega_moe(x, ids, router, ranks.shares, **options, max_num_tokens=bound)
        runs.append((out, tokens))
        if len(runs) == 50:
            for ys, each in runs:
                for y, ref in zip(ys, wanted[id(each)], strict=True):
                    error = reference.relative_error(y, ref[: len(y)].astype(cupy.uint16), cupy)
                    assert len(y) == 0 or error < 1e-2
            runs.clear()
    ranks.workspace.check()


def test_graph_replay():
    import cupy

    ranks = Ranks(4)
    tokens = ranks.tokens((30,) * 4)
    wanted = [y.copy() for y in ranks.run(tokens)]
    x = [encode_bf16(each.x, cupy) for each in tokens]
    ids, router = [t.topk_ids for t in tokens], [t.topk_weights for t in tokens]
    out = [cupy.zeros_like(y) for y in wanted]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(3):
            mega_moe(
                x, ids, router, ranks.shares, out=out, group=ranks.group, workspace=ranks.workspace
            )
        graph = stream.end_capture()
    for _ in range(5):
        for y in out:
            y.fill(0xFF)
        graph.launch()
        cupy.cuda.Device().synchronize()
        ranks.workspace.check()
        assert all(bool((y == ref).all()) for y, ref in zip(out, wanted, strict=True))


def test_expert_counts_are_those_of_all_ranks_tokens():
    import cupy

    ranks = Ranks(4)
    tokens = ranks.tokens((30, 5, 0, 100))
    counts = [cupy.zeros(4, cupy.int32) for _ in range(4)]
    ranks.run(tokens, expert_counts=counts)
    ids = cupy.concatenate([each.topk_ids.ravel() for each in tokens])
    wanted = cupy.bincount(ids[ids >= 0], minlength=16)[:16]
    assert bool((cupy.concatenate(counts) == wanted).all())


@pytest.mark.parametrize("num_tokens", [1, 40, 400])
def test_replicas_of_logical_experts(num_tokens):
    """Bits are those of one rank with the logical experts, whichever replicas tokens go to."""
    import cupy
    import numpy as np

    ranks = Ranks(4)
    expert_map = np.full((8, 3), -1, np.int32)  # all 16 experts but one
    expert_map[:6, 0], expert_map[:6, 1] = np.arange(6), np.arange(15, 9, -1)
    expert_map[6:8, 0], expert_map[0, 2] = np.arange(6, 8), 8
    logical = np.zeros(16, np.int32)
    for number, row in enumerate(expert_map):
        logical[row[row >= 0]] = number
    parts = ranks.layer.w13, ranks.layer.w2, ranks.layer.w13_scale, ranks.layer.w2_scale
    parts = [part[cupy.asarray(logical)] for part in parts]
    expert_map = cupy.asarray(expert_map)
    ranks.shares = [
        ExpertWeights(*(part[first:][:4] for part in parts)) for first in range(0, 16, 4)
    ]
    ranks.num_experts = 8  # logical ones, for tokens and their oracle
    tokens = ranks.tokens((num_tokens, 0, num_tokens, 3), "unused")
    for each in tokens:
        each.topk_ids[each.topk_ids >= 8] = -1  # experts of the whole layer, but of no row
    counts = [cupy.zeros(4, cupy.int32) for _ in range(4)]
    options = {"presum": False, "batch_invariant": True}
    ys = ranks.run(tokens, expert_map=expert_map, expert_counts=counts, **options)
    ranks.check(ys, tokens)
    used = [
        experts[experts >= 0]
        for rank, each in enumerate(tokens)
        for experts in [replicas_of(each.topk_ids, expert_map, rank, 16, cupy)]
    ]
    wanted = cupy.bincount(cupy.concatenate(used), minlength=16)
    assert bool((cupy.concatenate(counts) == wanted).all())
    x = encode_bf16(cupy.concatenate([each.x for each in tokens]), cupy)
    ids = cupy.concatenate([each.topk_ids for each in tokens])
    router = cupy.concatenate([each.topk_weights for each in tokens])
    whole = mega_moe(x, ids, router, ranks.whole, batch_invariant=True)
    assert bool((cupy.concatenate(ys) == whole.view(cupy.uint16)).all())
