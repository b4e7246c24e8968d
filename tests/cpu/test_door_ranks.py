"""mega_moe() on a LocalGroup, with everything below the door replaced: maps of logical experts."""

import numpy as np
import pytest
from test_door import (
    HIDDEN,
    TOKENS,
    TOP_K,
    FakeArray,
    FakeKernel,
    RoomyWorkspace,
    kernel,
    layer_weights,
    refusal,
)

from jitmoe import GroupWorkspace, LocalGroup, fused_ranks, mega_moe
from jitmoe.plan.gpu import gpu_spec

__all__ = ["kernel"]  # test_door's, which `ranks` builds on

PEERS = 55


class FakeGroupWorkspace(GroupWorkspace):
    def __init__(self, group):
        self.group, self.ready = group, {}
        self.workspaces = [RoomyWorkspace() for _ in group.ranks]

    def reserve(self, plan, rank_tokens, stream):
        return PEERS, plan.symmetric(64).offsets, 64

    def enter(self, plan, rank_tokens, digest):
        pass

    def check(self):
        pass


class FakeJoined:
    """Keeps the parameters of all ranks, where a kernel of one rank looks for its own."""

    def __init__(self, blocks):
        self.blocks = blocks

    def join(self):
        self.values = {rank: dict(block.values) for rank, block in enumerate(self.blocks)}


class FakeRanks:
    """Calls of two ranks, and the parameters that each is launched with."""

    def __init__(self, kernel):
        self.kernel, self.group = kernel, LocalGroup(2, device=0)
        self.workspace = FakeGroupWorkspace(self.group)
        self.weights = [layer_weights(), layer_weights()]

    def call(self, **options):
        x, out = (
            [FakeArray((TOKENS, HIDDEN), "uint16", ptr=ptr + (rank << 20)) for rank in range(2)]
            for ptr in (1 << 20, 1 << 24)
        )
        ids, router = ([FakeArray((TOKENS, TOP_K), t)] * 2 for t in ("int64", "float32"))
        given = {"out": out, "group": self.group, "workspace": self.workspace, "stream": 5}
        returned = mega_moe(x, ids, router, self.weights, **given | options)
        assert all(a is b for a, b in zip(returned, out, strict=True))
        values, stream = self.kernel.launches[-1]
        assert stream == 5
        return [values[rank] for rank in range(2)]


@pytest.fixture
def ranks(kernel, monkeypatch):
    def launch(params, stream, cooperative, grid):
        assert cooperative and grid == FakeKernel.grid
        kernel.launches.append((params.values, stream))

    kernel.launch = launch
    monkeypatch.setattr(fused_ranks, "device_spec", lambda device: gpu_spec("h200"))
    monkeypatch.setattr(fused_ranks, "JoinedParams", FakeJoined)
    return FakeRanks(kernel)


def test_ranks_have_parameters_of_their_own(ranks):
    for rank, values in enumerate(ranks.call()):
        assert values["x"] == (1 << 20) + (rank << 20)
        assert values["y"] == (1 << 24) + (rank << 20)
        assert (values["rank"], values["first_expert"], values["peers"]) == (rank, 4 * rank, PEERS)
        assert (values["rank_tokens"], values["num_own_tokens"]) == (TOKENS, TOKENS)
        assert (values["num_tokens"], values["rank_capacity"]) == (2 * TOKENS, 64)


def test_a_map_is_an_address_of_the_call(ranks):
    def given(expert_map):
        found = {
            tuple(values[n] for n in ("expert_map", "num_logical_experts", "max_replicas"))
            for values in ranks.call(expert_map=expert_map)
        }
        assert len(found) == 1, "one array serves all ranks"
        return found.pop()

    assert given(None) == (0, 0, 0)
    for ptr in (1 << 28, 1 << 29):
        assert given(FakeArray((6, 2), "int32", ptr=ptr)) == (ptr, 6, 2)
    assert given(None) == (0, 0, 0)
    assert len(ranks.workspace.ready) == 2
    assert given(FakeArray((6, 3), "int32")) == (1 << 20, 6, 3)


@pytest.mark.parametrize(
    "expert_map, part",
    [
        (FakeArray((6, 2), "int64"), "expert_map must have dtype i32, got i64; convert"),
        (FakeArray((6,), "int32"), "expert_map must have shape [*, *], got [6]; pass a row of"),
        (FakeArray((6, 0), "int32"), "expert_map must not be empty, got shape [6, 0]; pass a row"),
        (FakeArray((6, 2), "int32", (1, 6)), "expert_map must be contiguous, got strides [1, 6]"),
        (FakeArray((6, 2), "int32", device=1), "expert_map is on GPU 1, the weights are on GPU 0"),
    ],
)
def test_maps_that_do_not_fit(ranks, expert_map, part):
    assert part in refusal(lambda: ranks.call(expert_map=expert_map))
    assert not ranks.kernel.launches


def test_maps_on_the_host(ranks):
    for expert_map in (np.zeros((6, 2), np.int32), [FakeArray((6, 2), "int32")] * 2):
        message = refusal(lambda given=expert_map: ranks.call(expert_map=given), TypeError)
        assert "expert_map must be a GPU array, got" in message


def test_a_map_needs_ranks():
    x, ids, router = FakeArray((3, HIDDEN), "uint16"), FakeArray((3, 2), "int64"), None
    for options in ({}, {"backend": "emulated"}, {"group": LocalGroup(1, device=0)}):
        options["expert_map"] = FakeArray((6, 2), "int32")
        message = refusal(lambda given=options: mega_moe(x, ids, router, layer_weights(), **given))
        assert "expert_map is for a group of several ranks" in message
