"""Dispatch and combine on a GPU: inputs of ranks, and what must come of them."""

from __future__ import annotations

import cupy
import numpy as np

from jitmoe import fp8, reference


def calls_of(counts, hidden, num_experts, top_k, seed=0, routing="uniform", unused=0.1):
    """x, topk_ids and topk_weights of every rank, on the GPU."""
    calls = []
    for rank, count in enumerate(counts):
        of = reference.random_tokens(count, hidden, num_experts, top_k, seed + rank, routing)
        ids = np.where(
            np.random.default_rng(seed + rank).random(of.topk_ids.shape) < unused, -1, of.topk_ids
        )
        x = fp8.encode_bf16(of.x)
        calls.append(
            (cupy.asarray(x), cupy.asarray(ids.astype(np.int32)), cupy.asarray(of.topk_weights))
        )
    return [list(part) for part in zip(*calls, strict=True)]


def check_rows(calls, found, num_experts, layout):
    """Rows, records, counts and starts, against the tokens of all ranks."""
    x, ids, weights = ([array.get() for array in part] for part in calls)
    num_ranks, local = len(x), num_experts // len(x)
    for rank, own in enumerate(found):
        here = [(i >= rank * local) & (i < (rank + 1) * local) for i in ids]
        wanted = [(s, t) for s in range(num_ranks) for t in np.flatnonzero(here[s].any(1))]
        tokens, rows = own.num_received.get()
        assert tokens == len(wanted)
        got_ids, got_weights = own.topk_ids.get()[:tokens], own.topk_weights.get()[:tokens]
        is_fp8 = isinstance(own.x, tuple)
        data = own.x[0].get() if is_fp8 else own.x.view(cupy.uint16).get()
        scales = own.x[1].get() if is_fp8 else None
        starts = own.expert_starts.get()
        filled = starts[:-1].copy()
        counts = np.bincount(
            np.concatenate([i[h] for i, h in zip(ids, here, strict=True)]) - rank * local,
            minlength=local,
        )
        assert np.array_equal(own.expert_counts.get(), counts)
        for n, (source, token) in enumerate(wanted):
            mask = here[source][token]
            expected = np.where(mask, ids[source][token] - rank * local, -1)
            assert np.array_equal(got_ids[n], expected)
            assert np.array_equal(got_weights[n], np.where(mask, weights[source][token], 0))
            places = [n]
            if layout == "experts":
                places = []
                for e in expected[expected >= 0]:
                    places.append(filled[e])
                    filled[e] += 1
            token_row = x[source][token]
            if is_fp8:
                token_row, scale = fp8.quantize_tokens(fp8.decode_bf16(token_row[None]))
                token_row = token_row[0]
            for row in places:
                assert np.array_equal(data[row], token_row)
                assert scales is None or np.allclose(scales[row], scale[0], rtol=1e-6)
        assert rows == (starts[-1] if layout == "experts" else tokens)
        if own.num_rows is not None:
            assert (own.num_tokens, own.num_rows) == (tokens, rows)
            assert len(data) == rows and len(own.topk_ids) == tokens


def sums_of(calls, local_experts, layout):
    """What combine makes of rows that came back as they are, [num_tokens, hidden] f32 by rank."""
    for own, i, w in zip(*calls, strict=True):
        ids, weights = i.get(), w.get()
        if layout == "experts":
            factor = (weights * (ids >= 0)).sum(1)
        else:
            ranks = [len({e // local_experts for e in row if e >= 0}) for row in ids]
            factor = np.array(ranks, np.float32)
        yield fp8.decode_bf16(own.get()) * factor[:, None]


def experts_of(own, w13, w2):
    """What a rank's experts, of bf16 weights and SwiGLU, make of rows sorted by expert."""
    x = _float(own.x)
    y, starts = cupy.zeros_like(x), own.expert_starts.get()
    for e, count in enumerate(own.expert_counts.get()):
        at = slice(starts[e], starts[e] + count)
        gate, up = cupy.split(x[at] @ _float(w13[e]).T, 2, axis=1)
        y[at] = (gate / (1 + cupy.exp(-gate)) * up) @ _float(w2[e]).T
    return cupy.asarray(fp8.encode_bf16(y.get()))


def _float(bits):
    return cupy.asarray(fp8.decode_bf16(bits.view(cupy.uint16).get()))
