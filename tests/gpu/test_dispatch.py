"""Dispatch and combine on virtual ranks of one GPU."""

import numpy as np
import pytest

import jitmoe
from jitmoe import ExpertWeights, GroupWorkspace, LocalGroup, fp8, reference

cupy = pytest.importorskip("cupy")


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


@pytest.mark.parametrize("layout", ["tokens", "experts"])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rows(num_ranks, layout, format, exact):
    counts = [(37 * rank + 11) % 90 for rank in range(num_ranks)]
    counts[-1] = 0
    with LocalGroup(num_ranks) as group:
        calls = calls_of(counts, 1024, 32, 6, seed=num_ranks)
        options = {
            "group": group,
            "num_experts": 32,
            "layout": layout,
            "format": format,
            "exact": exact,
        }
        check_rows(calls, jitmoe.dispatch(*calls, **options), 32, layout)


@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_identity(routing):
    """Rows that come back as they are, weighted, are the token times the sum of its weights."""
    with LocalGroup(4) as group:
        x, ids, weights = calls_of([300, 0, 17, 128], 2048, 64, 8, 3, routing, unused=0)
        found = jitmoe.dispatch(x, ids, weights, group=group, num_experts=64, layout="experts")
        ys = jitmoe.combine([f.x for f in found], [f.handle for f in found], group=group)
        for y, own, i, w in zip(ys, x, ids, weights, strict=True):
            used = (i.get() >= 0) & (i.get() < 64)
            factor = (w.get() * used).sum(1, keepdims=True)
            wanted = fp8.decode_bf16(own.get()) * factor
            assert np.allclose(
                fp8.decode_bf16(y.view(cupy.uint16).get()), wanted, rtol=0.02, atol=0.02
            )


def test_a_handle_serves_other_tokens_and_later_combines():
    with LocalGroup(4) as group:
        x, ids, weights = calls_of([50, 60, 0, 70], 1024, 32, 4, 1)
        first = jitmoe.dispatch(x, ids, weights, group=group, num_experts=32)
        handles = [f.handle for f in first]
        again = jitmoe.dispatch([own * 1 for own in x], group=group, handle=handles)
        check_rows([x, ids, weights], again, 32, "tokens")
        other, *rest = calls_of([50, 60, 0, 70], 1024, 32, 4, 9)
        second = jitmoe.dispatch(other, *rest, group=group, num_experts=32)
        check_rows([other, *rest], second, 32, "tokens")
        third = jitmoe.dispatch(other, group=group, handle=handles)
        check_rows([other, ids, weights], third, 32, "tokens")
        ys = jitmoe.combine([f.x for f in third], handles, group=group)
        for y, own, i in zip(ys, other, ids, strict=True):
            ranks = [len({e // 8 for e in row if e >= 0}) for row in i.get()]
            wanted = fp8.decode_bf16(own.get()) * np.array(ranks, np.float32).reshape(-1, 1)
            assert np.allclose(
                fp8.decode_bf16(y.view(cupy.uint16).get()), wanted, rtol=0.01, atol=0.01
            )


def test_dispatch_experts_combine_is_mega_moe():
    hidden, intermediate, num_experts, top_k, num_ranks = 512, 256, 16, 4, 4
    local = num_experts // num_ranks
    layer = reference.random_layer(num_experts, hidden, intermediate, 0, format="bf16")
    w13, w2 = cupy.asarray(layer.w13), cupy.asarray(layer.w2)
    shares = [slice(r * local, (r + 1) * local) for r in range(num_ranks)]
    with LocalGroup(num_ranks) as group:
        calls = calls_of([100, 40, 0, 260], hidden, num_experts, top_k, 5)
        weights = [ExpertWeights(w13[s].copy(), w2[s].copy()) for s in shares]
        whole = jitmoe.mega_moe(*calls, weights, group=group)
        found = jitmoe.dispatch(
            *calls, group=group, num_experts=num_experts, layout="experts", exact=True
        )
        rows = []
        for own, share in zip(found, shares, strict=True):
            x = cupy.asarray(fp8.decode_bf16(own.x.view(cupy.uint16).get()))
            y, starts = cupy.zeros_like(x), own.expert_starts.get()
            for e, count in enumerate(own.expert_counts.get()):
                at = slice(starts[e], starts[e] + count)
                gate, up = cupy.split(x[at] @ _float(w13[share][e]).T, 2, axis=1)
                mid = gate / (1 + cupy.exp(-gate)) * up
                y[at] = mid @ _float(w2[share][e]).T
            rows.append(cupy.asarray(fp8.encode_bf16(y.get())))
        ys = jitmoe.combine(rows, [f.handle for f in found], group=group)
    for y, other in zip(ys, whole, strict=True):
        got, wanted = (fp8.decode_bf16(a.view(cupy.uint16).get()) for a in (y, other))
        assert reference.relative_error(got, wanted) < 6e-3


def _float(bits):
    return cupy.asarray(fp8.decode_bf16(bits.view(cupy.uint16).get()))


def test_in_a_graph():
    stream = cupy.cuda.Stream(non_blocking=True)
    with LocalGroup(2) as group, stream:
        workspace = GroupWorkspace(group)
        x, ids, weights = calls_of([64, 64], 1024, 16, 4, 2)
        options = {"group": group, "workspace": workspace}

        def step():
            found = jitmoe.dispatch(x, ids, weights, num_experts=16, max_num_tokens=64, **options)
            handles = [f.handle for f in found]
            return found, jitmoe.combine([f.x for f in found], handles, **options)

        kept = step()
        wanted = [y.copy() for y in kept[1]]
        stream.synchronize()
        stream.begin_capture()
        found, ys = step()
        graph = stream.end_capture()
        for _ in range(20):
            for y in ys:
                y.fill(0)
            graph.launch(stream)
        stream.synchronize()
        workspace.check()
        assert all((y == other).all() for y, other in zip(ys, wanted, strict=True))
        check_rows([x, ids, weights], found, 16, "tokens")


def test_many_random_rounds():
    rng = np.random.default_rng(0)
    with LocalGroup(4) as group:
        for round_ in range(250):
            counts = rng.integers(0, 60, 4).tolist()
            layout = ("tokens", "experts")[round_ % 2]
            x, ids, weights = calls_of(counts, 512, 32, 4, round_ * 10, unused=0.2)
            options = {"group": group, "num_experts": 32, "layout": layout, "max_num_tokens": 64}
            found = jitmoe.dispatch(x, ids, weights, **options)
            ys = jitmoe.combine([f.x for f in found], [f.handle for f in found], group=group)
            if round_ % 10:
                continue  # back to back
            check_rows([x, ids, weights], found, 32, layout)
            for y, own, i, w in zip(ys, x, ids, weights, strict=True):
                used = i.get() >= 0
                if layout == "experts":
                    factor = (w.get() * used).sum(1)
                else:
                    factor = np.array(
                        [len({e // 8 for e in row if e >= 0}) for row in i.get()], np.float32
                    )
                wanted = fp8.decode_bf16(own.get()) * factor[:, None]
                got = fp8.decode_bf16(y.view(cupy.uint16).get())
                assert np.allclose(got, wanted, rtol=0.02, atol=0.02)


def test_torch():
    torch = pytest.importorskip("torch")
    with LocalGroup(2) as group:
        calls = calls_of([30, 50], 1024, 16, 4, 4)
        x = [torch.from_dlpack(own).view(torch.bfloat16) for own in calls[0]]
        ids, weights = ([torch.from_dlpack(own) for own in part] for part in calls[1:])
        found = jitmoe.dispatch(
            x, ids, weights, group=group, num_experts=16, format="fp8", exact=True
        )
        assert found[0].x[0].dtype == torch.float8_e4m3fn and found[0].topk_ids.dtype == torch.int32
        rows = [(f.x[0].float() * f.x[1].repeat_interleave(128, 1)).bfloat16() for f in found]
        bias = [torch.randn(own.shape, device=own.device).bfloat16() for own in x]
        ys = jitmoe.combine(rows, [f.handle for f in found], group=group, bias=bias)
        for y, own, i, more in zip(ys, x, ids, bias, strict=True):
            ranks = [len({e // 8 for e in row if e >= 0}) for row in i.tolist()]
            wanted = own.float() * torch.tensor(ranks, device=own.device)[:, None] + more.float()
            assert (y.float() - wanted).abs().max() < 0.35
