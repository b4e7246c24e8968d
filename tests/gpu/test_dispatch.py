"""Dispatch and combine on virtual ranks of one GPU."""

import numpy as np
import pytest

import jitmoe
from jitmoe import ExpertWeights, GroupWorkspace, LocalGroup, fp8, reference

cupy = pytest.importorskip("cupy")

from transfer_checks import calls_of, check_rows, experts_of, sums_of  # noqa: E402


@pytest.mark.parametrize("layout", ["tokens", "experts"])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rows(num_ranks, layout, format, exact):
    rows(LocalGroup(num_ranks), layout, format, exact)


@pytest.mark.parametrize("layout", ["tokens", "experts"])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("nodes, ranks", [(2, 1), (2, 2), (2, 4), (4, 2), (8, 1)])
def test_rows_of_nodes(nodes, ranks, layout, format):
    rows(LocalGroup(nodes=nodes, ranks_per_node=ranks), layout, format, exact=nodes == 2)


def rows(group, layout, format, exact):
    num_ranks = group.num_ranks
    counts = [(37 * rank + 11) % 90 for rank in range(num_ranks)]
    counts[-1] = 0
    with group:
        calls = calls_of(counts, 1024, 32, 6, seed=num_ranks)
        options = {
            "group": group,
            "num_experts": 32,
            "layout": layout,
            "format": format,
            "exact": exact,
        }
        check_rows(calls, jitmoe.dispatch(*calls, **options), 32, layout)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_identity(routing, nodes):
    """Rows that come back as they are, weighted, are the token times the sum of its weights."""
    with LocalGroup(4, nodes=nodes) as group:
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


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_handle_serves_other_tokens_and_later_combines(nodes):
    with LocalGroup(4, nodes=nodes) as group:
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


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_dispatch_experts_combine_is_mega_moe(nodes):
    hidden, intermediate, num_experts, top_k, num_ranks = 512, 256, 16, 4, 4
    local = num_experts // num_ranks
    layer = reference.random_layer(num_experts, hidden, intermediate, 0, format="bf16")
    w13, w2 = cupy.asarray(layer.w13), cupy.asarray(layer.w2)
    shares = [slice(r * local, (r + 1) * local) for r in range(num_ranks)]
    calls = calls_of([100, 40, 0, 260], hidden, num_experts, top_k, 5)
    with LocalGroup(num_ranks) as group:
        weights = [ExpertWeights(w13[s].copy(), w2[s].copy()) for s in shares]
        whole = jitmoe.mega_moe(*calls, weights, group=group)
        cupy.cuda.Device().synchronize()
    with LocalGroup(num_ranks, nodes=nodes) as group:
        found = jitmoe.dispatch(
            *calls, group=group, num_experts=num_experts, layout="experts", exact=True
        )
        rows = [
            experts_of(own, w13[share], w2[share]) for own, share in zip(found, shares, strict=True)
        ]
        ys = jitmoe.combine(rows, [f.handle for f in found], group=group)
    for y, other in zip(ys, whole, strict=True):
        got, wanted = (fp8.decode_bf16(a.view(cupy.uint16).get()) for a in (y, other))
        assert reference.relative_error(got, wanted) < 6e-3


@pytest.mark.parametrize("nodes", [1, 2])
def test_in_a_graph(nodes):
    stream = cupy.cuda.Stream(non_blocking=True)
    with LocalGroup(2, nodes=nodes) as group, stream:
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


SHAPES = [(1, 2), (1, 8), (2, 2), (2, 4), (4, 2)]  # nodes, ranks of each


@pytest.mark.parametrize("nodes, ranks", SHAPES)
def test_many_random_rounds(nodes, ranks):
    rounds(nodes, ranks, 200, "memory")


@pytest.mark.parametrize("nodes, ranks", [shape for shape in SHAPES if shape[0] > 1])
def test_rounds_over_a_rail_that_is_late_and_out_of_order(nodes, ranks):
    rounds(nodes, ranks, 60, "delayed")


def rounds(nodes, ranks, number, rail):
    """Random routings back to back; every tenth is looked at."""
    rng = np.random.default_rng(nodes * 8 + ranks)
    experts = 4 * nodes * ranks
    with LocalGroup(nodes=nodes, ranks_per_node=ranks, rail=rail) as group:
        for round_ in range(number):
            counts = rng.integers(0, 60, group.num_ranks).tolist()
            layout = ("tokens", "experts")[round_ % 2]
            calls = calls_of(counts, 512, experts, 4, round_ * 10, unused=0.2)
            options = {"group": group, "num_experts": experts, "layout": layout}
            found = jitmoe.dispatch(*calls, max_num_tokens=64, **options)
            ys = jitmoe.combine([f.x for f in found], [f.handle for f in found], group=group)
            if round_ % 10 == 0:
                check_rows(calls, found, experts, layout)
                for y, wanted in zip(ys, sums_of(calls, 4, layout), strict=True):
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
