"""Dispatch and combine between ranks, emulated, against NumPy."""

import numpy as np
import pytest
from transfer_reference import (
    LAYOUTS,
    check_combined,
    check_dispatched,
    check_handles,
    combined,
    make_plan,
    random_calls,
    random_rows,
)

from jitmoe import fp8, reference
from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.transfer import EmulatedTransfer

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(params=LAYOUTS, scope="module")
def emulated(request):
    return EmulatedTransfer(make_plan(**LAYOUTS[request.param]), rank_tokens=24)


@pytest.mark.parametrize("counts", [(24, 24, 24), (1, 0, 5), (0, 0, 0), (0, 17, 2)])
def test_rows_go_where_their_experts_are(emulated, counts):
    calls = random_calls(emulated.plans[0], counts, seed=sum(counts))
    check_dispatched(emulated, calls, emulated.dispatch(calls, seed=1))


@pytest.mark.parametrize("routing", reference.ROUTINGS)
def test_routings(routing):
    plan = make_plan(expert_rows=True, alignment=8)
    emulated = EmulatedTransfer(plan, rank_tokens=20)
    calls = random_calls(plan, (20, 3, 11), 4, routing)
    check_dispatched(emulated, calls, emulated.dispatch(calls, seed=2))


@pytest.mark.parametrize("num_ranks, num_experts, top_k", [(2, 40, 7), (8, 2, 16), (5, 33, 32)])
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_sizes(num_ranks, num_experts, top_k, num_blocks):
    plan = make_plan(num_ranks, 128, num_experts, min(top_k, num_ranks * num_experts))
    emulated = EmulatedTransfer(plan, rank_tokens=40, num_blocks=num_blocks)
    calls = random_calls(plan, [(7 * rank + 3) % 41 for rank in range(num_ranks)], 1)
    check_dispatched(emulated, calls, emulated.dispatch(calls, seed=5))


@pytest.mark.parametrize("hidden", [128, 640, 3712])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_rows_that_leave_lanes_idle(hidden, format):
    plan = make_plan(2, hidden, 4, 2, format=format)
    emulated = EmulatedTransfer(plan, rank_tokens=5)
    calls = random_calls(plan, (5, 3))
    sent = emulated.dispatch(calls, seed=1)
    check_dispatched(emulated, calls, sent)
    rng = np.random.default_rng(2)
    rows = [random_rows(rng, own.num_received[1], hidden) for own in sent]
    ys = emulated.combine(rows, sent, seed=1)
    for y, ref in zip(ys, combined(plan, calls, sent, rows), strict=True):
        assert np.allclose(fp8.decode_bf16(y), ref, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_drift_apart(seed):
    plan = make_plan(expert_rows=True, format="fp8")
    emulated = EmulatedTransfer(plan, rank_tokens=16, num_blocks=2)
    rounds = [
        random_calls(plan, counts, 3 * i)
        for i, counts in enumerate(((16, 2, 9), (0, 16, 1), (5, 5, 5)))
    ]
    found = emulated.dispatches(rounds, seed=seed, delays=True)
    for calls, sent in zip(rounds, found, strict=True):
        check_handles(plan, calls, sent)
    check_dispatched(emulated, rounds[-1], found[-1])
    emulated.dispatches([rounds[-1]] * 2, found[-1], seed=seed, delays=True)
    check_dispatched(emulated, rounds[-1], found[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(2))
def test_no_races(layout, seed):
    plan = make_plan(**LAYOUTS[layout])
    emulated = EmulatedTransfer(plan, rank_tokens=6, num_blocks=2, checked=True)
    rounds = [random_calls(plan, counts, 3 * i) for i, counts in enumerate(((6, 2, 5), (0, 6, 1)))]
    sent = emulated.dispatches(rounds, seed=seed, delays=seed == 1)[-1]
    check_dispatched(emulated, rounds[-1], sent)
    rng = np.random.default_rng(1)
    rows = [random_rows(rng, own.num_received[1], plan.hidden) for own in sent]
    ys = emulated.combine(rows, sent, num_launches=2, seed=seed, delays=seed == 1)
    check_combined(ys, combined(plan, rounds[-1], sent, rows))


def test_scales_that_come_with_tokens():
    plan = make_plan(format="fp8")
    emulated = EmulatedTransfer(plan, rank_tokens=12)
    calls = [
        (fp8.quantize_tokens(fp8.decode_bf16(x)), ids.astype(np.int64), fp8.encode_bf16(weights))
        for x, ids, weights in random_calls(plan, (12, 4, 0))
    ]
    sent = emulated.dispatch(calls, seed=3)
    check_dispatched(emulated, calls, sent)


@pytest.mark.parametrize("kill", [0, 3000])
def test_a_rank_that_stops_is_named(kill):
    plan = make_plan()
    emulated = EmulatedTransfer(plan, rank_tokens=8, num_blocks=2)
    emulated.dispatch(random_calls(plan, (8, 8, 8)), seed=0, kill=(1, kill), expire=True)
    for rank in (0, 2):
        waited, what, index = emulated.status[rank][[0, 1, 4]]
        assert (waited, index) == (1, 1) and what in (19, 20)


@pytest.mark.parametrize("kill", [10, 3000])
def test_a_rank_that_sends_no_sums_is_named(kill):
    plan = make_plan()
    emulated = EmulatedTransfer(plan, rank_tokens=8, num_blocks=2)
    sent = emulated.dispatch(random_calls(plan, (8, 8, 8)), seed=0)
    rows = [random_rows(np.random.default_rng(1), own.num_received[1], plan.hidden) for own in sent]
    emulated.combine(rows, sent, seed=0, kill=(2, kill), expire=True)
    for rank in (0, 1):
        waited, what, index = emulated.status[rank][[0, 1, 4]]
        assert (waited, index) == (1, 2) and what in (21, 22)


@pytest.mark.parametrize("layout", ["tokens", "experts"])
@pytest.mark.parametrize("num_biases", [0, 1, 2])
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_come_home(layout, num_biases, weighted):
    plan = make_plan(**LAYOUTS[layout])
    emulated, rng = EmulatedTransfer(plan, rank_tokens=24), np.random.default_rng(5)
    counts = (24, 0, 9)
    calls = random_calls(plan, counts, seed=7)
    sent = emulated.dispatch(calls, seed=2)
    rows = [random_rows(rng, own.num_received[1], plan.hidden) for own in sent]
    biases = [[random_rows(rng, n, plan.hidden) for _ in range(num_biases)] for n in counts]
    ys = emulated.combine(rows, sent, biases, weighted, seed=3)
    check_combined(ys, combined(plan, calls, sent, rows, biases, weighted))
    again = emulated.combine(rows, sent, biases, weighted, num_launches=3, seed=4, delays=True)
    assert all(np.array_equal(y, other) for y, other in zip(ys, again, strict=True))
