"""Dispatch and combine between nodes, emulated: data races, and ranks that stop."""

import pytest
from test_emulate_hybrid import make_nodes, rows_for, uneven
from transfer_reference import check_combined, check_dispatched, combined, random_calls

from jitmoe.emulate.compile import NoHostCompiler, compiler
from jitmoe.emulate.transfer import EmulatedTransfer

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize(
    "num_nodes, node_ranks, layout, rail, seed",
    [
        (2, 2, "tokens", "gin", 0),
        (2, 2, "tokens", "memory", 1),
        (2, 2, "experts", "gin", 1),
        (3, 1, "experts", "memory", 0),
        (3, 1, "tokens, fp8", "gin", 1),
        (2, 3, "tokens, fp8", "memory", 0),
        (2, 3, "experts, fp8", "gin", 0),
        (2, 1, "experts, fp8", "memory", 1),
    ],
)
def test_no_races(num_nodes, node_ranks, layout, rail, seed):
    """Odd seeds hold ranks back. Blocks without a channel, and what a launch leaves to the next."""
    plan = make_nodes(num_nodes, node_ranks, layout, rail, 128, 2, 3)
    emulated = EmulatedTransfer(plan, rank_tokens=6, num_blocks=2, checked=True)
    counts, options = uneven(plan, 6), {"seed": seed, "delays": seed % 2 == 1}
    first, second = random_calls(plan, counts, 3), random_calls(plan, counts[::-1], 4)
    sent = emulated.dispatches([first, second, first], num_cached=1, **options)[0]
    check_dispatched(emulated, first, sent)
    rows = rows_for(plan, sent)
    ys = emulated.combine(rows, sent, num_launches=2, **options)
    check_combined(ys, combined(plan, first, sent, rows))


def stopped(emulated, rank):
    """(what was waited for, of which rank) by rank of the others; None where nothing ran out."""
    words = {r: status.tolist() for r, status in enumerate(emulated.status) if r != rank}
    return {r: (status[1], status[4]) if status[0] else None for r, status in words.items()}


def with_killed(kill, *, dispatch):
    """One block has no channel and waits for the others."""
    plan = make_nodes(2, 2, "tokens", "gin", 128, 2, 2)
    emulated = EmulatedTransfer(plan, rank_tokens=8, num_blocks=3)
    calls, options = random_calls(plan, (8, 8, 8, 8)), {"kill": kill, "expire": True}
    if dispatch:
        emulated.dispatch(calls, **options)
    else:
        sent = emulated.dispatch(calls)
        emulated.combine(rows_for(plan, sent), sent, **options)
    return stopped(emulated, kill[0])


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("step", [0, 3000])
def test_all_name_a_rank_that_tells_no_counts(rank, step):
    """Its mates may lack the counts of others for want of it, and the others hear by its peer."""
    found = with_killed((rank, step), dispatch=True)
    assert {said[1] for said in found.values()} == {rank}
    assert {said[0] for said in found.values()} <= {19, 23}
    assert found[rank ^ 1][0] == 19


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_sends_no_messages_is_named(rank):
    """By those next to it; who waits for its peer names that."""
    mate, peer, other = rank ^ 1, rank ^ 2, rank ^ 3
    found = with_killed((rank, 80_000), dispatch=True)
    assert found[mate] == (20, rank)
    assert found[peer] == (24, rank)
    assert found[other] == (20, peer)


@pytest.mark.parametrize("rank, step", [(1, 0), (2, 0), (1, 20_000), (2, 20_000)])
def test_a_rank_that_sends_no_sums_is_named(rank, step):
    mate, peer, other = rank ^ 1, rank ^ 2, rank ^ 3
    found = with_killed((rank, step), dispatch=False)
    assert {r: said[1] for r, said in found.items()} == {mate: rank, peer: rank, other: mate}
    assert found[mate][0] == (25 if step else 21) and found[other][0] == 26
    assert found[peer][0] in ((23, 26) if step else (23,))


def test_a_rank_that_stops_when_all_is_sent_harms_nobody():
    found = with_killed((1, 10_000_000), dispatch=False)
    assert set(found.values()) == {None}
