"""dispatch() and combine() of a group of several nodes: what it refuses, what reaches kernels."""

import sys
from types import SimpleNamespace

import pytest
from test_door import refusal
from test_door_dispatch import HIDDEN, arguments, tokens, values_of, workspace_of
from test_door_dispatch import Launch as StandIn
from test_door_dispatch import launches as launches

from jitmoe import LocalGroup, combine, dispatch
from jitmoe.dispatched import handle_regions
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.hybrid import HybridPlan
from jitmoe.plan.hybrid_combine import HybridCombinePlan
from jitmoe.plan.hybrid_dispatch import HybridDispatchPlan
from jitmoe.plan.transfer_pairs import combine_of, dispatch_plan
from jitmoe.run.symmetric import Rail, SymmetricMemory
from jitmoe.transfer_launch import Launch

PLAN = dispatch_plan("sm_90a", HIDDEN, 2, 2, 4, num_nodes=2, local_ranks=4)


@pytest.mark.parametrize(
    "given, shape",
    [
        ({"num_ranks": 4}, (4, 1, 4)),
        ({"num_ranks": 4, "nodes": 2}, (4, 2, 2)),
        ({"nodes": 3, "ranks_per_node": 2}, (6, 3, 2)),
        ({"num_ranks": 6, "nodes": 3, "ranks_per_node": 2}, (6, 3, 2)),
        ({"nodes": 1, "ranks_per_node": 5}, (5, 1, 5)),
        ({"nodes": 32, "ranks_per_node": 2}, (64, 32, 2)),
        ({"nodes": 2, "ranks_per_node": 32, "rail": "delayed"}, (64, 2, 32)),
    ],
)
def test_shapes_of_a_group(given, shape):
    group = LocalGroup(**given, device=0)
    assert (group.num_ranks, group.num_nodes, group.ranks_per_node) == shape
    assert group.ranks == tuple(range(shape[0])) and group.rail == given.get("rail", "memory")


@pytest.mark.parametrize(
    "given, text",
    [
        ({}, "num_ranks is missing; pass it, or nodes and ranks_per_node"),
        ({"nodes": 2}, "num_ranks is missing"),
        ({"num_ranks": 0}, "num_ranks must be an int from 1 to 64, got 0"),
        ({"num_ranks": 4, "nodes": 0}, "nodes must be an int from 1 to 32, got 0"),
        ({"num_ranks": 4, "nodes": 2.0}, "nodes must be an int from 1 to 32, got 2.0"),
        ({"num_ranks": 64, "nodes": 64}, "nodes must be an int from 1 to 32, got 64"),
        (
            {"num_ranks": 5, "nodes": 2},
            "a node may have 1 to 32 ranks, as many as every other, got 2.5",
        ),
        ({"nodes": 2, "ranks_per_node": 33}, "a node may have 1 to 32 ranks"),
        ({"nodes": 2, "ranks_per_node": 0}, "a node may have 1 to 32 ranks"),
        ({"nodes": 4, "ranks_per_node": 32}, "num_ranks must be an int from 1 to 64, got 128"),
        ({"num_ranks": 6, "nodes": 2, "ranks_per_node": 2}, "2 nodes of 2 ranks are not 6 ranks"),
        ({"num_ranks": 2, "nodes": 1, "ranks_per_node": 3}, "1 nodes of 3 ranks are not 2 ranks"),
        ({"num_ranks": 4, "nodes": 2, "rail": "gin"}, 'rail must be "memory" or "delayed", got'),
    ],
)
def test_a_group_refuses(given, text):
    assert text in refusal(lambda: LocalGroup(**given, device=0))


def of_nodes(*counts, nodes=2, rail="memory"):
    group = LocalGroup(len(counts), nodes=nodes, device=0, rail=rail)
    return arguments(*counts) | {"group": group, "workspace": workspace_of(group)}


@pytest.mark.parametrize("nodes, rail", [(2, "memory"), (4, "delayed"), (1, "memory")])
def test_which_plan_reaches_the_kernel(launches, nodes, rail):
    given = of_nodes(3, 0, 2, 1, nodes=nodes, rail=rail)
    handles = dispatch(**given, layout="experts", num_sms=6)
    options = {"group": given["group"], "workspace": given["workspace"], "stream": 5}
    combine(
        [tokens(900)] * 4, handles, out=[tokens(n, ptr=1 << 27) for n in (3, 0, 2, 1)], **options
    )
    (plan, *_), (back, *_) = launches
    assert back == combine_of(plan) and plan.expert_rows and plan.local_ranks == 4
    if nodes == 1:
        assert type(plan) is DispatchPlan and back.name == "combine"
        return
    assert isinstance(plan, HybridDispatchPlan) and isinstance(back, HybridCombinePlan)
    assert (plan.num_nodes, plan.node_ranks, plan.rail) == (nodes, 4 // nodes, rail)


@pytest.fixture
def with_channels(launches, monkeypatch):
    """What of_rank was asked for; a launch has 7 tokens a channel."""
    asked = []

    def of_rank(launch, index, channel_tokens=0):
        asked.append(channel_tokens)
        return 0, *[0] * len(HybridPlan.symmetric_names), index, 192, 30, 0, 0, 0, 0, 64, 3, 7

    monkeypatch.setattr(StandIn, "channel_tokens", 7)
    monkeypatch.setattr(StandIn, "of_rank", of_rank)
    return asked


def test_handles_know_their_channels_and_lists(launches, with_channels):
    given = of_nodes(3, 0, 2, 1)
    handles = dispatch(**given)
    assert [own.channel_tokens for own in handles] == [7] * 4
    sent = values_of(launches[0][-1], 0)
    regions = handle_regions(launches[0][0], 3, 3).offsets
    assert sent["forwarded"] == (1 << 25) + regions["forwarded"]
    assert sent["source_starts"] == (1 << 25) + regions["source_starts"]
    options = {"group": given["group"], "workspace": given["workspace"], "stream": 5}
    out = [tokens(n, ptr=1 << 27) for n in (3, 0, 2, 1)]
    combine([tokens(900)] * 4, handles, out=out, **options)
    back = values_of(launches[1][-1], 0)
    assert all(back[name] == sent[name] for name in ("forwarded", "source_starts", "places"))
    assert with_channels == [0] * 4 + [7] * 4, "a combine has the channels of its dispatch"
    again = dispatch(given["x"], handle=handles, num_sms=3, **options)
    assert with_channels[8:] == [0] * 4, "a dispatch has its own, whatever its places are"
    assert [own.channel_tokens for own in again] == [7] * 4


def test_memory_of_handles():
    shapes = {r.name: r.shape for r in handle_regions(PLAN, 3, 9).regions}
    assert shapes["forwarded"] == (2, 9, 2) and shapes["source_starts"] == (5,)
    one = {r.name for r in handle_regions(dispatch_plan("sm_90a", HIDDEN, 2, 2, 4), 3, 9).regions}
    assert not one & {"forwarded", "source_starts"}


def memory_of(group, rail=None):
    """A workspace that has symmetric memory of ranks at 100, 200, ..., and its table at 5000."""
    workspace = workspace_of(group)
    bases = [100 * (rank + 1) for rank in range(group.num_ranks)]
    memory = SymmetricMemory(1, bases, lambda: None, rail)
    table = SimpleNamespace(data=SimpleNamespace(ptr=5000))
    workspace._capacity = 64
    workspace._shared = {PLAN.symmetric(64): (memory, table)}
    return workspace


@pytest.mark.parametrize("nodes, per_node", [(2, 2), (4, 1), (3, 2)])
def test_tables_of_rail_peers(nodes, per_node, monkeypatch):
    """All ranks' bases come first, then those of each rail, node by node."""
    group, tables = LocalGroup(nodes=nodes, ranks_per_node=per_node, device=0), []
    bases = [100 * (rank + 1) for rank in range(group.num_ranks)]
    group.allocate = lambda num_bytes: SymmetricMemory(num_bytes, bases, lambda: None)

    class Device:
        def __init__(self, number): ...
        def __enter__(self):
            return SimpleNamespace(synchronize=lambda: None)

        def __exit__(self, *_): ...

    cupy = SimpleNamespace(
        cuda=SimpleNamespace(Device=Device),
        asarray=lambda data: tables.append(data.tolist()) or SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    workspace = workspace_of(group)
    workspace._allocate(PLAN.symmetric(64))
    [table] = tables
    assert table[: group.num_ranks] == bases
    workspace = memory_of(group)
    for rank in range(group.num_ranks):
        address, *nccl = workspace.rail(PLAN, rank)
        first = (address - 5000) // 8
        peers = [bases[node * per_node + rank % per_node] for node in range(nodes)]
        assert table[first : first + nodes] == peers and nccl == [0, 0, 0]


def test_what_nccl_needs_of_a_rail():
    group = LocalGroup(4, nodes=2, device=0)
    assert memory_of(group, Rail(11, 22, 33)).rail(PLAN, 3)[1:] == (11, 22, 33)


@pytest.mark.parametrize("channels, of_launch", [(0, 2), (9, 9)])
def test_parameters_of_nodes(monkeypatch, channels, of_launch):
    """In the order of the plan's, with the room there is and the most tokens of a rank."""
    group = LocalGroup(4, nodes=2, device=0)
    workspace = memory_of(group, Rail(11, 22, 33))
    own = SimpleNamespace(bank_words=lambda plan: 192, timeout_us=30)
    workspace.workspaces = [own] * 4
    launch = object.__new__(Launch)
    launch.__dict__ |= {"_workspace": workspace, "_plan": PLAN, "_peers": 5000, "_capacity": 64}
    launch.__dict__ |= {"_offsets": PLAN.symmetric(64).offsets, "_rank_tokens": 17}
    launch.channel_tokens = 2
    names = [param.name for param in PLAN.rank_params]
    values = dict(zip(names, launch.of_rank(3, channels), strict=True))
    assert values["peers"] == 5000 and values["rank"] == 3
    assert values["rail_peers"] == 5000 + 8 * (4 + 2)
    assert [values[f"rail_{name}"] for name in ("comm", "window", "offset")] == [11, 22, 33]
    assert (values["rank_capacity"], values["rank_tokens"]) == (64, 17)
    assert values["channel_tokens"] == of_launch
    assert values["sent_at"] == PLAN.symmetric(64).offsets["sent"]
