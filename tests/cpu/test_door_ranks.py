"""mega_moe() of a group: what it refuses, and what the kernel is given, with stand-ins below it."""

import ctypes
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from test_door import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOP_K,
    FakeArray,
    FakeKernel,
    FakeParams,
    call_arrays,
    layer_weights,
    refusal,
    weight_arrays,
)

from jitmoe import ExpertWeights, GroupWorkspace, LocalGroup, RankMismatch, fused_ranks, mega_moe
from jitmoe import prepare as preparing
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.mega_moe_params import SYMMETRIC
from jitmoe.run import group_workspace
from jitmoe.run import workspace as workspaces
from jitmoe.run.symmetric import Group, SymmetricMemory
from jitmoe.run.workspace import CaptureError, DeviceTimeout


class Memory:
    """Device memory that is the host's."""

    def __init__(self, array):
        self.array, self.nbytes = array, array.nbytes
        self.data = SimpleNamespace(ptr=array.ctypes.data)

    def fill(self, value):
        self.array[...] = value


def bytes_at(address, num_bytes):
    return (ctypes.c_uint8 * num_bytes).from_address(address)


class Pinned(bytearray):
    ptr = 77


class Joined:
    def __init__(self, blocks):
        self.blocks = blocks

    def join(self):
        self.values = [dict(block.values) for block in self.blocks]


class Kernel(FakeKernel):
    def launch(self, params, stream, cooperative, grid):
        self.launches.append((params.values, stream, cooperative, grid))


class Device:
    id = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def kernel(monkeypatch):
    kernel, kernel.is_capturing = Kernel(), False
    cupy = SimpleNamespace(
        uint8=np.uint8,
        zeros=lambda n, dtype: Memory(np.zeros(n, dtype)),
        empty=lambda n, dtype: Memory(np.zeros(n, dtype)),
        asarray=Memory,
        ndarray=lambda n, _, at: Memory(np.ctypeslib.as_array(bytes_at(at, n))),
    )
    cupy.cuda = SimpleNamespace(
        Device=lambda number=0: Device(),
        alloc_pinned_memory=Pinned,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        UnownedMemory=lambda at, num_bytes, owner: at,
        MemoryPointer=lambda memory, offset: memory + offset,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(fused_ranks, "device_spec", lambda device: gpu_spec("h200"))
    monkeypatch.setattr(fused_ranks, "JoinedParams", Joined)
    monkeypatch.setattr(preparing, "loaded", lambda plan, device: kernel)
    monkeypatch.setattr(preparing, "load", lambda plan, device: kernel)
    monkeypatch.setattr(preparing, "ParamBlock", FakeParams)
    monkeypatch.setattr(preparing, "encode_u8_map", lambda *_: bytes(128))
    monkeypatch.setattr(workspaces, "on_stream", lambda stream: nullcontext())
    for module in (group_workspace, workspaces, preparing):
        monkeypatch.setattr(module, "is_capturing", lambda stream: kernel.is_capturing)
    return kernel


class Peers(Group):
    """A rank that is a process of its own; the others do as `others` says."""

    def __init__(self, rank=1, num_ranks=4):
        self.num_ranks, self.ranks, self.device = num_ranks, (rank,), 0
        self.calls, self.memory = [], []

    def allocate(self, num_bytes):
        self.calls.append("allocate")
        self.memory.append(np.zeros(num_bytes, np.uint8))
        bases = [self.memory[-1].ctypes.data + rank - self.ranks[0] for rank in range(4)]
        return SymmetricMemory(num_bytes, bases, lambda: self.calls.append("close"))

    def agree(self, what, **facts):
        self.calls.append(("agree", facts["max_num_tokens"]))

    def barrier(self):
        self.calls.append("barrier")

    def close(self):
        pass


def lists_of(*counts, base=1 << 20):
    """Arguments of ranks with so many tokens, at addresses of their own."""
    lists = {}
    for rank, num in enumerate(counts):
        for at, (name, array) in enumerate(call_arrays(tokens=num).items()):
            ptr = base + (rank << 26) + (at << 22)
            array = FakeArray(array.shape, array.dtype.name, ptr=ptr)
            lists.setdefault(name, []).append(array)
    return lists


class Ranks:
    """A LocalGroup with a layer, and calls of it."""

    def __init__(self, num_ranks=3):
        self.group = LocalGroup(num_ranks, device=0)
        self.workspace = GroupWorkspace(self.group)
        self.weights = [layer_weights() for _ in range(num_ranks)]

    def __call__(self, given, **changes):
        options = {"group": self.group, "workspace": self.workspace, "stream": 5}
        options |= {"weights": self.weights} | given | changes
        return mega_moe(**options)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "weights", "out"])
def test_lists_have_an_item_for_each_rank(kernel, name):
    ranks, given = Ranks(3), lists_of(3, 3, 3)
    whole = given | {"weights": ranks.weights}
    for wrong, got in (
        (whole[name][:2], "2 items"),
        (whole[name] * 2, "6 items"),
        ([], "0 items"),
        (whole[name][0], type(whole[name][0]).__name__),
        (tuple(whole[name]), "tuple"),
    ):
        message = refusal(lambda wrong=wrong: ranks(given, **{name: wrong}))
        assert f"{name} must be a list with an item for each of the 3 ranks" in message
        assert message.endswith(f"got {got}")
    assert not kernel.launches


def test_ranks_of_several_nodes_are_refused(kernel):
    """Before any rank waits for another."""
    group = Peers()
    group.num_nodes = 2
    given = {name: values[0] for name, values in lists_of(3).items()}
    call = partial(mega_moe, **given, weights=layer_weights(), stream=5, max_num_tokens=8)
    assert refusal(lambda: call(group=group)) == (
        "mega_moe runs inside one NVLink domain, the group has ranks of 2 nodes; take dispatch and "
        "combine, or a group of each node"
    )
    assert not kernel.launches and not group.calls
    call(group=Peers())
    assert len(kernel.launches) == 1


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "weights"])
def test_none_is_no_list(kernel, name):
    assert f"{name} must be a list" in refusal(lambda: Ranks()(lists_of(1, 1, 1), **{name: None}))


def test_a_rank_is_checked_as_a_call_is(kernel):
    given = lists_of(3, 3, 3)
    given["x"][2] = FakeArray((TOKENS, HIDDEN), "float32")
    assert "x must have dtype bf16 or u16, got f32" in refusal(lambda: Ranks()(given))


def changed(**changes):
    return ExpertWeights(**weight_arrays() | changes)


BIASES = {
    "w13_bias": FakeArray((EXPERTS, 384), "float32"),
    "w2_bias": FakeArray((EXPERTS, HIDDEN), "float32"),
}


@pytest.mark.parametrize(
    "other, text",
    [
        (lambda: ExpertWeights(**weight_arrays(experts=5)), "num_experts is 5 on rank 1, 4 on"),
        (
            lambda: ExpertWeights(**weight_arrays(intermediate=256)),
            "intermediate is 256 on rank 1, 192 on the others",
        ),
        (
            lambda: changed(
                w13_scale=FakeArray((4, 384), "float32"), w2_scale=FakeArray((4, 512), "float32")
            ),
            "format is 'fp8_channel' on rank 1, 'fp8_block' on the others",
        ),
        (lambda: changed(gate_up="up_first"), "gate_up is 'up_first' on rank 1"),
        (lambda: changed(**BIASES), "has_bias is True on rank 1, False on the others"),
    ],
)
def test_weights_of_ranks_must_be_alike(kernel, other, text):
    ranks = Ranks()
    ranks.weights[1] = other()
    assert text in refusal(lambda: ranks(lists_of(3, 3, 3)))
    assert not kernel.launches


def test_hidden_and_slots_must_be_alike(kernel):
    ranks, given = Ranks(), lists_of(3, 3, 3)
    ranks.weights[2] = ExpertWeights(**weight_arrays(hidden=256))
    given["x"][2], given["out"][2] = (
        FakeArray((3, 256), dtype, ptr=given[name][2].data.ptr)
        for name, dtype in (("x", "bfloat16"), ("out", "uint16"))
    )
    assert "hidden is 256 on rank 2, 512 on the others" in refusal(lambda: ranks(given))
    given = lists_of(3, 3, 3)
    given["topk_ids"][0] = FakeArray((3, 1), "int64")
    given["topk_weights"][0] = FakeArray((3, 1), "float32")
    assert "top_k is 1 on rank 0, 2 on the others" in refusal(lambda: Ranks()(given))


def test_weights_on_another_gpu(kernel):
    ranks = Ranks()
    ranks.group.device = 1
    assert "weights are on GPU 0, the group is on GPU 1" in refusal(
        lambda: ranks(lists_of(1, 1, 1))
    )


def test_what_a_group_decides_itself(kernel):
    for name, value in (("plan", object()), ("backend", "emulated"), ("first_expert", 4)):
        message = refusal(lambda n=name, v=value: Ranks()(lists_of(1, 1, 1), **{n: v}))
        assert message.startswith(f"{name} must be ") and "leave it out" in message


def test_workspaces_of_others(kernel):
    ranks, others = Ranks(), Ranks()
    for workspace in (others.workspace, ranks.workspace.workspaces[0]):
        message = refusal(lambda w=workspace: ranks(lists_of(1, 1, 1), workspace=w))
        assert "must be a GroupWorkspace of the group, or left out" in message


def test_a_group_without_a_workspace_has_one_of_its_own(kernel):
    ranks = Ranks()
    for _ in range(2):
        ranks(lists_of(3, 3, 3), workspace=None)
    own = fused_ranks.implicit_workspace(ranks.group)
    assert len(own.ready) == 1 and own is not fused_ranks.implicit_workspace(Ranks().group)


def test_bounds(kernel):
    ranks = Ranks()
    for bound in (2, 0, -1):
        message = refusal(lambda b=bound: ranks(lists_of(1, 3, 2), max_num_tokens=b))
        assert f"a rank has 3 tokens, max_num_tokens is {bound}; pass a bound" in message
    ranks(lists_of(1, 3, 2))
    ranks(lists_of(1, 3, 2), max_num_tokens=9)
    ranks(lists_of(0, 0, 0))
    assert [values[0]["rank_tokens"] for values, *_ in kernel.launches] == [3, 9, 1]


def test_ranks_in_processes_need_a_bound(kernel):
    group = Peers()
    workspace, given = GroupWorkspace(group), call_arrays()

    def call(**options):
        mega_moe(**given, weights=layer_weights(), group=group, workspace=workspace, **options)

    assert "max_num_tokens must be given" in refusal(lambda: call(stream=0))
    assert not kernel.launches and not group.calls
    call(stream=0, max_num_tokens=8)
    [(values, _, _, grid)] = kernel.launches
    assert len(values) == 1 and grid == 132
    own = values[0]
    assert (own["rank"], own["first_expert"], own["rank_tokens"]) == (1, EXPERTS, 8)
    assert (own["num_tokens"], own["num_own_tokens"]) == (32, TOKENS)
    # Memory is collective, and no rank launches before all have the kernel.
    assert group.calls == ["barrier", "allocate", ("agree", 8), "barrier"]
    call(stream=0, max_num_tokens=8)
    assert len(group.calls) == 4 and len(kernel.launches) == 2


def test_ranks_that_plan_otherwise(kernel):
    group = Peers()

    def agree(what, **facts):
        raise RankMismatch("plan is a on rank 0, b on the others")

    group.agree = agree
    workspace = GroupWorkspace(group)
    options = {"group": group, "workspace": workspace, "stream": 0, "max_num_tokens": 8}
    for _ in range(2):
        with pytest.raises(RankMismatch):
            mega_moe(**call_arrays(), weights=layer_weights(), **options)
    assert not kernel.launches and not workspace.ready


def test_parameters_of_each_rank(kernel):
    ranks, given = Ranks(3), lists_of(3, 0, 7)
    assert ranks(given) == given["out"]
    [(values, stream, cooperative, grid)] = kernel.launches
    assert (stream, cooperative, grid) == (5, True, 132)
    memory, table = next(iter(ranks.workspace._shared.values()))
    offsets = next(iter(ranks.workspace._shared)).offsets
    for rank, own in enumerate(values):
        assert own["rank"] == rank and own["first_expert"] == rank * EXPERTS
        assert (own["num_tokens"], own["rank_tokens"], own["rank_capacity"]) == (21, 7, 64)
        assert own["num_own_tokens"] == (3, 0, 7)[rank]
        assert own["peers"] == table.data.ptr and tuple(table.array) == memory.bases
        assert {name: own[f"{name}_at"] for name in SYMMETRIC} == offsets
        for name, field in (("x", "x"), ("topk_ids", "topk_ids"), ("out", "y")):
            assert own[field] == given[name][rank].data.ptr
        assert own["w13_scale"] == ranks.weights[rank].w13_scale.ptr
        assert own["first_stride"] == values[0]["first_stride"]
        assert own["row_capacity"] >= 3 * 64 * TOP_K
    # Each has scratch and counters of its own.
    for name in ("pool", "mid", "slices", "header", "banks", "combine_count"):
        assert len({own[name] for own in values}) == 3, name


def test_addresses_are_written_at_every_call(kernel):
    ranks = Ranks(2)
    calls = [lists_of(3, 3), lists_of(3, 3, base=1 << 30), lists_of(3, 3)]
    for given in calls:
        ranks(given)
    assert len(ranks.workspace.ready) == 1
    for (values, *_), given in zip(kernel.launches, calls, strict=True):
        assert [own["x"] for own in values] == [x.data.ptr for x in given["x"]]


def test_launches_are_made_ready_for_layouts_bounds_and_sums(kernel):
    ranks = Ranks(2)
    for num_ready, given, options in (
        (1, lists_of(3, 3), {}),
        (2, lists_of(3, 2), {}),
        (2, lists_of(3, 3), {"max_num_tokens": 3}),
        (3, lists_of(3, 3), {"max_num_tokens": 4}),
        (4, lists_of(3, 3), {"presum": True}),
        (5, lists_of(3, 3), {"routed_scaling_factor": 2.0}),
        (5, lists_of(3, 2), {}),
    ):
        ranks(given, **options)
        assert len(ranks.workspace.ready) == num_ready


def test_memory_that_moves_makes_launches_ready_again(kernel):
    ranks = Ranks(2)
    few, many = lists_of(3, 3), lists_of(3, 100)
    ranks(few)
    [first] = ranks.workspace.ready.values()
    ranks(many)  # more room: symmetric memory is another
    ranks(few)
    before, _, after = (values for values, *_ in kernel.launches)
    assert first not in ranks.workspace.ready.values()
    for old, new in zip(before, after, strict=True):
        assert old["rank_capacity"] == 64 and new["rank_capacity"] == 128
        assert old["slots_at"] != new["slots_at"]
    ranks.workspace.workspaces[1].generation += 1  # as when the scratch of one rank moves
    ranks(few)
    assert len(kernel.launches) == 4
    newest = list(ranks.workspace.ready.values())[-1]
    assert newest.generation == ranks.workspace.generation


@pytest.mark.parametrize("is_captured", [True, False])
def test_memory_of_a_captured_graph_outlives_growth(kernel, monkeypatch, is_captured):
    ranks = Ranks(2)
    ranks(lists_of(3, 3))
    [(first, _)] = ranks.workspace._shared.values()
    monkeypatch.setattr(ranks.workspace.workspaces[1], "_captured", is_captured)
    ranks(lists_of(3, 100))
    assert bool(first.bases) == is_captured
    ranks.workspace.close()
    assert not first.bases


def test_captures_need_memory_that_is_there(kernel):
    ranks = Ranks(2)
    kernel.is_capturing = True
    message = refusal(lambda: ranks(lists_of(3, 3)), CaptureError)
    assert "memory for 3 tokens a rank must be allocated" in message
    kernel.is_capturing = False
    ranks(lists_of(3, 3))
    kernel.is_capturing = True
    ranks(lists_of(3, 3))
    ranks(lists_of(2, 3))  # of a capacity that is there
    message = refusal(lambda: ranks(lists_of(3, 300)), CaptureError)
    assert "memory for 300 tokens a rank" in message and "before capturing" in message
    assert len(kernel.launches) == 3


def test_captures_need_the_kernel(kernel, monkeypatch):
    ranks = Ranks(2)
    ranks(lists_of(3, 3))
    monkeypatch.setattr(preparing, "loaded", lambda plan, device: None)
    kernel.is_capturing = True
    message = refusal(lambda: ranks(lists_of(3, 3), batch_invariant=True), CaptureError)
    assert "kernel of the decode bucket is not loaded" in message


def test_a_launch_that_hung_stops_all_until_reset(kernel):
    ranks = Ranks(2)
    ranks(lists_of(3, 3))
    [(memory, _)] = ranks.workspace._shared.values()
    [regions] = ranks.workspace._shared
    own = [bytes_at(base, regions.num_bytes) for base in memory.bases]
    for rank in own:
        ctypes.memset(rank, 0xFF, regions.num_bytes)
    second = ranks.workspace.workspaces[1]
    second._status[0], second._status[1], second._status[4] = 1, 17, 5
    with pytest.raises(DeviceTimeout, match=r"rows of expert 5, which rank 1 owes"):
        ranks(lists_of(3, 3))
    for control in (w._controls for w in ranks.workspace.workspaces):
        for _, array in control.values():
            array.fill(7)
    ranks.workspace.reset()
    kept = regions.offsets["pair_experts"]
    for rank in own:
        for begin, num_bytes in regions.zeroed:
            assert not any(rank[begin : begin + num_bytes]) and begin < kept
        assert all(byte == 0xFF for byte in rank[kept : kept + 99])
    for workspace in ranks.workspace.workspaces:
        assert not any(array.array.any() for _, array in workspace._controls.values())
    ranks(lists_of(3, 3))
    assert len(kernel.launches) == 2


def test_a_timeout_names_the_rank_that_is_waited_for(kernel):
    ranks = Ranks(2)
    ranks(lists_of(3, 3))
    workspace = ranks.workspace.workspaces[0]
    for wait, text in ((15, "the routing of rank 1"), (16, "the tokens of rank 1")):
        workspace._status[0], workspace._status[1], workspace._status[4] = 1, wait, 1
        with pytest.raises(DeviceTimeout, match=f"still waited for {text}"):
            ranks.workspace.check()
