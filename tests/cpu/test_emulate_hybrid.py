"""Dispatch and combine between nodes, emulated, against NumPy. "gin" is a network card that is late
and keeps no order, "memory" the rail between GPUs that reach each other.
"""

import numpy as np
import pytest
from transfer_reference import (
    LAYOUTS,
    check_combined,
    check_dispatched,
    check_handles,
    check_no_sums,
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


def make_nodes(num_nodes, node_ranks, layout="tokens", rail="gin", *sizes, **fields):
    """`sizes` are hidden, experts of a rank, top_k."""
    fields = LAYOUTS[layout] | {"num_nodes": num_nodes, "rail": rail} | fields
    return make_plan(num_nodes * node_ranks, *sizes, **fields)


def uneven(plan, most):
    """Numbers of tokens: `most` and none among them."""
    return [(most, 0, most // 2, 1)[rank % 4] for rank in range(plan.num_ranks)]


def rows_for(plan, sent, seed=1):
    rng = np.random.default_rng(seed)
    return [random_rows(rng, own.num_received[1], plan.hidden) for own in sent]


def there_and_back(emulated, calls, seed=0, first_expert=0, **options):
    """A dispatch and a combine, both checked."""
    plan = emulated.plans[0]
    sent = emulated.dispatch(calls, seed=seed, **options)
    check_dispatched(emulated, calls, sent, first_expert)
    rows = rows_for(plan, sent, seed)
    ys = emulated.combine(rows, sent, seed=seed + 1, **options)
    check_combined(ys, combined(plan, calls, sent, rows))
    return sent


@pytest.mark.parametrize(
    "num_nodes, node_ranks, layout, rail, num_blocks",
    [
        (2, 2, "tokens", "gin", 1),
        (2, 2, "experts, fp8", "memory", 2),
        (2, 4, "experts", "gin", 3),
        (4, 2, "tokens, fp8", "gin", 2),
        (2, 1, "tokens, fp8", "memory", 4),
        (2, 1, "experts", "gin", 2),
        (3, 2, "experts, fp8", "gin", 4),
        (3, 2, "tokens", "memory", 3),
    ],
)
def test_there_and_back(num_nodes, node_ranks, layout, rail, num_blocks):
    plan = make_nodes(num_nodes, node_ranks, layout, rail)
    emulated = EmulatedTransfer(plan, rank_tokens=24, num_blocks=num_blocks)
    counts = uneven(plan, 24)
    there_and_back(emulated, random_calls(plan, counts, num_blocks), seed=num_nodes)
    there_and_back(emulated, random_calls(plan, counts[::-1], 50), seed=num_nodes)


@pytest.mark.parametrize("routing", reference.ROUTINGS)
@pytest.mark.parametrize("layout, rail", [("tokens", "gin"), ("experts", "memory")])
def test_routings(routing, layout, rail):
    plan = make_nodes(2, 2, layout, rail, 128)
    emulated = EmulatedTransfer(plan, rank_tokens=13, num_blocks=1)
    there_and_back(emulated, random_calls(plan, (13, 3, 0, 8), 4, routing), seed=2)


@pytest.mark.parametrize("where", ["own node", "other node", "first rank", "nowhere"])
def test_tokens_of_one_node(where):
    plan = make_nodes(2, 2, "tokens", "gin", 128, 4, 3)
    emulated, each = EmulatedTransfer(plan, rank_tokens=9, num_blocks=2), plan.num_all_experts // 2
    calls = []
    for rank, (x, ids, weights) in enumerate(random_calls(plan, (9, 4, 0, 7), 3)):
        node = {"own node": rank // 2, "other node": 1 - rank // 2}.get(where, 0)
        on_node = np.where(ids >= 0, ids % each + node * each, -1)
        first = np.where(ids >= 0, ids % plan.num_experts, -1)
        none = np.full_like(ids, -1)
        calls.append((x, {"first rank": first, "nowhere": none}.get(where, on_node), weights))
    there_and_back(emulated, calls, seed=5)


@pytest.mark.parametrize("rank_tokens, num_blocks", [(1, 1), (1, 4), (7, 4), (100, 1), (300, 1)])
def test_channels(rank_tokens, num_blocks):
    """Fewer tokens than channels, several news of one, and more than a lane has a token of."""
    plan = make_nodes(2, 2, "tokens", "gin", 8, 2, 2)
    emulated = EmulatedTransfer(plan, rank_tokens, num_blocks)
    counts = (rank_tokens, 0, rank_tokens // 2, rank_tokens)
    sent = there_and_back(emulated, random_calls(plan, counts, 1), seed=3)
    assert sent[0].channel_tokens == {1: 1, 7: 1, 100: 17, 300: 50}[rank_tokens]


@pytest.mark.parametrize(
    "num_nodes, node_ranks, sizes", [(2, 8, (128, 2, 16)), (8, 1, (128, 5, 7))]
)
def test_sizes(num_nodes, node_ranks, sizes):
    plan = make_nodes(num_nodes, node_ranks, "experts", "gin", *sizes)
    emulated = EmulatedTransfer(plan, rank_tokens=5, num_blocks=1)
    there_and_back(emulated, random_calls(plan, uneven(plan, 5), 1), seed=5)


def test_more_ranks_than_lanes_and_every_slot_of_32():
    plan = make_nodes(2, 17, "tokens", "gin", 128, 1, 32)
    emulated = EmulatedTransfer(plan, rank_tokens=3, num_blocks=1)
    there_and_back(emulated, random_calls(plan, uneven(plan, 3), 1), seed=5)


@pytest.mark.parametrize("hidden", [8, 640, 4224])
@pytest.mark.parametrize("layout", ["tokens", "experts"])
def test_rows_that_leave_lanes_idle(hidden, layout):
    plan = make_nodes(2, 1, layout, "gin", hidden, 4, 2)
    emulated = EmulatedTransfer(plan, rank_tokens=5, num_blocks=1)
    there_and_back(emulated, random_calls(plan, (5, 3)), seed=1)


@pytest.mark.parametrize("layout", ["tokens, fp8", "experts, fp8"])
def test_scales_that_come_with_tokens_of_any_types(layout):
    plan = make_nodes(2, 2, layout, "gin", 4224, 4, 3)
    emulated = EmulatedTransfer(plan, rank_tokens=6, num_blocks=1, first_expert=9)
    calls = [
        (fp8.quantize_tokens(fp8.decode_bf16(x)), ids.astype(np.int64), fp8.encode_bf16(weights))
        for x, ids, weights in random_calls(plan, (6, 4, 0, 1), first_expert=9)
    ]
    there_and_back(emulated, calls, 3, first_expert=9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(2))
def test_ranks_drift_apart(layout, seed):
    """Dispatches behind each other, then combines, then both again."""
    plan = make_nodes(2, 2, layout)
    emulated = EmulatedTransfer(plan, rank_tokens=16, num_blocks=2)
    rounds = [
        random_calls(plan, counts, 3 * i)
        for i, counts in enumerate(((16, 2, 0, 9), (0, 16, 1, 3), (5, 5, 5, 5)))
    ]
    for turn in range(2):
        options = {"seed": 2 * seed + turn, "delays": True}
        found = emulated.dispatches(rounds, **options)
        for calls, sent in zip(rounds, found, strict=True):
            check_handles(plan, calls, sent)
        check_dispatched(emulated, rounds[-1], found[-1])
        if turn == 0:
            check_no_sums(emulated)
        # Any handle will do, not the last dispatch's alone.
        calls, sent = rounds[turn], found[turn]
        rows = [rows_for(plan, sent, launch) for launch in range(3)]
        for one, ys in zip(rows, emulated.combines(rows, sent, **options), strict=True):
            check_combined(ys, combined(plan, calls, sent, one))


@pytest.mark.parametrize("layout, rail", [("tokens", "gin"), ("experts, fp8", "memory")])
def test_cached_places_and_other_numbers_of_blocks(layout, rail):
    """Channels are those of a launch, a handle's those of its dispatch."""
    plan = make_nodes(2, 2, layout, rail)
    emulated = EmulatedTransfer(plan, rank_tokens=40, num_blocks=4)
    calls = random_calls(plan, (40, 3, 0, 17), 1)
    [sent] = emulated.dispatches([calls], seed=1)
    before = [own.forwarded.copy() for own in sent]
    for num_blocks in (1, 3):
        emulated.num_blocks = num_blocks
        others = [(np.roll(x, num_blocks, axis=0), *rest) for x, *rest in calls]
        emulated.dispatches([calls, others], sent, seed=num_blocks, delays=True)
        check_dispatched(emulated, others, sent)
        rows = rows_for(plan, sent, num_blocks)
        ys = emulated.combine(rows, sent, num_launches=2, seed=num_blocks, delays=True)
        check_combined(ys, combined(plan, calls, sent, rows))
    for own, old in zip(sent, before, strict=True):
        assert np.array_equal(own.forwarded, old), "a cached dispatch leaves handles alone"


@pytest.mark.parametrize("layout, rail", [("tokens", "gin"), ("experts", "gin")])
@pytest.mark.parametrize("num_biases, weighted", [(0, False), (1, True), (2, False)])
def test_sums_come_home(layout, rail, num_biases, weighted):
    plan, counts = make_nodes(2, 2, layout, rail), (24, 0, 9, 1)
    emulated, rng = EmulatedTransfer(plan, rank_tokens=24), np.random.default_rng(5)
    calls = random_calls(plan, counts, seed=7)
    sent = emulated.dispatch(calls, seed=2)
    rows = rows_for(plan, sent)
    biases = [[random_rows(rng, n, plan.hidden) for _ in range(num_biases)] for n in counts]
    ys = emulated.combine(rows, sent, biases, weighted, seed=3)
    check_combined(ys, combined(plan, calls, sent, rows, biases, weighted))
    emulated.num_blocks = 1
    again = emulated.combine(rows, sent, biases, weighted, num_launches=3, seed=4, delays=True)
    assert all(np.array_equal(y, other) for y, other in zip(ys, again, strict=True))
