"""Dispatch and combine in NumPy: inputs of ranks, what must come to each and what comes back."""

from __future__ import annotations

import numpy as np

from jitmoe import fp8, reference
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.transfer_pairs import dispatch_plan

LAYOUTS = {
    "tokens": {},
    "experts": {"expert_rows": True, "alignment": 4},
    "tokens, fp8": {"format": "fp8"},
    "experts, fp8": {"format": "fp8", "expert_rows": True, "alignment": 1},
}


def make_plan(num_ranks=3, hidden=512, num_experts=4, top_k=4, **fields) -> DispatchPlan:
    plan = dispatch_plan("sm_90a", hidden, num_experts, top_k, num_ranks, **fields)
    plan.check(GPUS["h200"])
    return plan


def random_calls(plan, counts, seed=0, routing="uniform", first_expert=0):
    """(x, ids, weights) of each rank; some slots are unused, their ids just out of range or -1."""
    calls, end = [], first_expert + plan.num_all_experts
    for rank, count in enumerate(counts):
        of = reference.random_tokens(
            count, plan.hidden, plan.num_all_experts, plan.top_k, seed + rank, routing
        )
        rng = np.random.default_rng(seed + rank)
        ids = np.where(of.topk_ids < 0, -1, of.topk_ids + first_expert)
        unused = rng.choice([-1, first_expert - 1, end], ids.shape)
        ids = np.where(rng.random(ids.shape) < 0.1, unused, ids).astype(np.int32)
        calls.append((fp8.encode_bf16(of.x), ids, of.topk_weights))
    return calls


def expected(plan, calls, rank, first_expert=0):
    """What must come to `rank`: (source, token, ids there or -1, weights, part) in order. The part
    counts the token's ranks on the node, in the order of slots.
    """
    tokens = []
    for source, (_, ids, weights) in enumerate(calls):
        if weights.dtype == np.uint16:
            weights = fp8.decode_bf16(weights)
        experts = ids.astype(np.int64) - first_expert
        for token in range(len(ids)):
            ranks = experts[token] // plan.num_experts
            here = ranks == rank
            if here.any():
                first = here.argmax()
                of_node = plan.num_ranks // getattr(plan, "num_nodes", 1)
                mates = (ranks // of_node == rank // of_node) & (ranks >= 0)
                part = len({*ranks[:first][mates[:first]]})
                local = np.where(here, experts[token] - rank * plan.num_experts, -1)
                tokens.append((source, token, local, np.where(here, weights[token], 0), part))
    return tokens


def starts_of(plan, tokens):
    """First rows of experts, and the end."""
    counts = [sum((t[2] == e).sum() for t in tokens) for e in range(plan.num_experts)]
    return counts, np.cumsum([0, *(-(-c // plan.alignment) * plan.alignment for c in counts)])


def places_of(plan, tokens):
    """Rows of each token in order, with expert_rows those of its slots there."""
    if not plan.expert_rows:
        return [[n] for n in range(len(tokens))]
    filled, places = dict(enumerate(starts_of(plan, tokens)[1])), []
    for _, _, local, _, _ in tokens:
        places.append([])
        for expert in local[local >= 0]:
            places[-1].append(filled[expert])
            filled[expert] += 1
    return places


def check_handles(plan, calls, sent, first_expert=0):
    """What a dispatch leaves on every rank, but for rows."""
    k = plan.top_k
    for rank, own in enumerate(sent):
        tokens = expected(plan, calls, rank, first_expert)
        counts, starts = starts_of(plan, tokens)
        num, num_rows = own.num_received
        assert num == len(tokens) and tuple(own.host_received) == (num + 1, num_rows)
        assert num_rows == (starts[-1] if plan.expert_rows else num)
        assert own.expert_counts.tolist() == counts
        assert own.expert_starts.tolist() == starts.tolist()
        places = places_of(plan, tokens)
        for (source, token, local, weights, part), rows, words in zip(
            tokens, places, own.records, strict=False
        ):
            assert words[0] == token and words[1] == source << 8 | part
            assert words[2 : 2 + k].view(np.int32).tolist() == local.tolist()
            assert np.array_equal(words[2 + k : 2 + 2 * k].view(np.float32), weights)
            if plan.expert_rows:
                assert words[2 + 2 * k :][local >= 0].tolist() == rows
                assert (words[2 + 2 * k :][local < 0] == 0xFFFFFFFF).all()


def check_rows(emulated, calls, first_expert=0):
    """Rows and their scales on every rank."""
    plan = emulated.plans[0]
    for rank in range(plan.num_ranks):
        tokens = expected(plan, calls, rank, first_expert)
        rows = emulated.region(rank, "rows", np.uint8 if plan.format == "fp8" else np.uint16)
        scales = emulated.region(rank, "row_scales", np.float32)
        for (source, token, *_), places in zip(tokens, places_of(plan, tokens), strict=True):
            codes, scale = calls[source][0], None
            if plan.format == "fp8" and not isinstance(codes, tuple):
                codes = fp8.quantize_tokens(fp8.decode_bf16(codes))
            if isinstance(codes, tuple):
                codes, scale = codes
            for row in places:
                assert np.array_equal(rows[row], codes[token])
                assert scale is None or np.array_equal(scales[row], scale[token])


def check_dispatched(emulated, calls, sent, first_expert=0):
    check_handles(emulated.plans[0], calls, sent, first_expert)
    check_rows(emulated, calls, first_expert)


def check_no_sums(emulated):
    """Dispatches, and nothing else so far, have left alone what combines send."""
    for rank in range(emulated.plans[0].num_ranks):
        for region in emulated.map.regions:
            if region.name in ("node_sums", "sums"):
                assert (emulated.region(rank, region.name) == 0xFF).all(), region.name


def random_rows(rng, num, hidden):
    return fp8.encode_bf16(rng.standard_normal((num, hidden)).astype(np.float32))


def combined(plan, calls, sent, rows, biases=None, weighted=True):
    """y of every rank as float64 by NumPy: sums on a rank, rounded to bf16, then of a node's ranks,
    rounded where there are several nodes, then of nodes.
    """
    k, num_nodes = plan.top_k, getattr(plan, "num_nodes", 1)
    shape = num_nodes, plan.hidden
    nodes = [np.zeros((len(ids), *shape), np.float32) for _, ids, _ in calls]
    for rank, own in enumerate(sent):
        for n in range(own.num_received[0]):
            words = own.records[n]
            if plan.expert_rows:
                used = words[2 : 2 + k].view(np.int32) >= 0
                factor = words[2 + k : 2 + 2 * k].view(np.float32) if weighted else np.ones(k)
                parts = fp8.decode_bf16(rows[rank][words[2 + 2 * k :][used]]).astype(np.float64)
                total = fp8.round_bf16((parts * factor[used, None]).sum(0).astype(np.float32))
            else:
                total = fp8.decode_bf16(rows[rank][n])
            nodes[words[1] >> 8][words[0], rank * num_nodes // plan.num_ranks] += total
    if num_nodes > 1:
        nodes = [fp8.round_bf16(of) for of in nodes]
    ys = [of.astype(np.float64).sum(1) for of in nodes]
    for y, of in zip(ys, biases or [[]] * len(ys), strict=True):
        for bias in of:
            y += fp8.decode_bf16(bias)
    return ys


def check_combined(ys, wanted):
    for y, ref in zip(ys, wanted, strict=True):
        assert np.allclose(fp8.decode_bf16(y), ref, rtol=2**-7, atol=1e-2)
