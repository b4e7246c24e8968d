"""dispatch() and combine() without a GPU: what they refuse, and what reaches the kernel."""

from types import SimpleNamespace

import pytest
from test_door import FakeArray, refusal

from jitmoe import DispatchHandle, LocalGroup, combine, dispatch, transfer_arguments, transfers
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.transfer import SYMMETRIC
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.symmetric import Group
from jitmoe.run.workspace import CaptureError

HIDDEN, EXPERTS, TOP_K = 512, 8, 2


class Launch:
    """Stands in for a kernel: keeps the parameters of every rank by name."""

    channel_tokens = 0

    def __init__(self, plan, num_ranks):
        self.plan, self.ranks, self.runs = plan, [None] * num_ranks, 0
        self.row_addresses = [(1 << 30, 1 << 30)] * num_ranks

    def memory(self, index, *names):
        return *(hash(name) % 1000 for name in names), 99

    def of_rank(self, index, channel_tokens=0):
        return 0, *[0] * len(SYMMETRIC), index, 192, 30

    def write(self, index, *values):
        self.ranks[index] = values

    def run(self, stream):
        self.runs += 1
        self.stream = stream


class Counts:
    def clear(self):
        return 4242

    def wait(self, check):
        return 5, 7


class Process(Group):
    """Rank 1 of 4, a process of its own."""

    num_ranks, ranks, device = 4, (1,), 0

    def allocate(self, num_bytes): ...
    def agree(self, what, **facts): ...
    def barrier(self): ...
    def close(self): ...


def workspace_of(group):
    workspace = object.__new__(GroupWorkspace)
    workspace.__dict__ |= {
        "group": group,
        "workspaces": [],
        "host_counts": [Counts() for _ in group.ranks],
        "check": lambda: None,
    }
    return workspace


@pytest.fixture
def launches(monkeypatch):
    """Calls that got as far as a kernel: (plan, bound, num_sms, launch)."""
    made = []

    def ready(workspace, plan, bound, stream, num_sms):
        launch = Launch(plan, len(workspace.group.ranks))
        made.append((plan, bound, num_sms, launch))
        return launch

    def new_handle(group, plan, num_tokens, bound, rank, family, stream):
        memory = SimpleNamespace(data=SimpleNamespace(ptr=1 << 25))
        return DispatchHandle(group, plan, num_tokens, bound, rank, family, memory)

    transfers._checked_plan.cache_clear()
    monkeypatch.setattr(transfers, "ready", ready)
    monkeypatch.setattr(transfers, "new_handle", new_handle)
    monkeypatch.setattr(transfers, "Dispatched", lambda own, addresses: own)
    monkeypatch.setattr(transfers, "device_spec", lambda device: gpu_spec("h200"))
    monkeypatch.setattr(transfers, "is_capturing", lambda stream: stream == 666)
    return made


def tokens(count, hidden=HIDDEN, dtype="bfloat16", **changes):
    return FakeArray((count, hidden), dtype, **changes)


def routing(count, top_k=TOP_K):
    return FakeArray((count, top_k), "int32"), FakeArray((count, top_k), "float32")


def arguments(*counts):
    ids, weights = zip(*map(routing, counts), strict=True)
    group = LocalGroup(len(counts), device=0)
    return {
        "x": [tokens(count) for count in counts],
        "topk_ids": list(ids),
        "topk_weights": list(weights),
        "group": group,
        "workspace": workspace_of(group),
        "num_experts": EXPERTS,
        "stream": 5,
    }


def of_process(count, **changes):
    group = Process()
    ids, weights = routing(count)
    given = {"x": tokens(count), "topk_ids": ids, "topk_weights": weights, "group": group}
    given |= {"workspace": workspace_of(group), "num_experts": EXPERTS, "stream": 5}
    return given | {"max_num_tokens": 64} | changes


def values_of(launch, rank):
    names = [param.name for param in launch.plan.params]
    return dict(zip(names, launch.ranks[rank], strict=True))


def test_what_reaches_the_kernel(launches):
    given = arguments(3, 0)
    found = dispatch(**given, layout="experts", format="fp8", num_sms=6, first_expert=9)
    [(plan, bound, num_sms, launch)] = launches
    assert (plan.num_experts, plan.num_ranks, plan.local_ranks) == (4, 2, 2)
    assert (plan.expert_rows, plan.alignment, plan.format) == (True, 128, "fp8")
    assert (bound, num_sms, launch.runs, launch.stream) == (3, 6, 1, 5)
    first, second = values_of(launch, 0), values_of(launch, 1)
    assert (first["num_tokens"], second["num_tokens"]) == (3, 0)
    assert first["x_is_bf16"] and not first["is_cached"] and not first["host_received"]
    assert first["first_expert"] == second["first_expert"] == 9
    assert first["x_stride"] == 2 * HIDDEN and first["status"] == 99
    assert [own.num_tokens for own in found] == [3, 0]
    assert [own.received for own in found] == [None, None]


def test_exact(launches):
    found = dispatch(**arguments(3, 2), exact=True)
    assert [own.received for own in found] == [(5, 7), (5, 7)]
    assert values_of(launches[0][-1], 1)["host_received"] == 4242
    message = refusal(
        lambda: dispatch(**arguments(3, 2) | {"stream": 666}, exact=True), CaptureError
    )
    assert "take exact=False" in message


def test_tokens_in_fp8(launches):
    given = of_process(4, x=(tokens(4, dtype="float8_e4m3fn"), FakeArray((4, 4), "float32")))
    handle = dispatch(**given)
    plan, bound, _, launch = launches[0]
    assert plan.format == "fp8" and bound == 64 and handle.rank == 1
    values = values_of(launch, 0)
    assert not values["x_is_bf16"] and values["x_stride"] == HIDDEN
    assert (values["x_scale_token_stride"], values["x_scale_group_stride"]) == (4, 1)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"layout": "rows"}, 'layout must be "tokens" or "experts", got \'rows\''),
        ({"alignment": 8}, 'alignment is of layout "experts"'),
        ({"num_experts": 10}, "num_experts must be given and a multiple of the 4 ranks, got 10"),
        ({"num_experts": None}, "num_experts must be given"),
        ({"max_num_tokens": None}, "max_num_tokens must be given where ranks are processes"),
        ({"max_num_tokens": 262_145}, "a rank may have up to 262,144 tokens, got 262,145"),
        ({"max_num_tokens": 3}, "a rank has 4 tokens, max_num_tokens is 3"),
        ({"format": "int4"}, "format must be bf16 or fp8"),
        ({"topk_ids": None}, "topk_ids and topk_weights must be given unless a handle is"),
        ({"x": tokens(4, 508, strides=(512, 1))}, "hidden must be a multiple of 8"),
        ({"x": tokens(4, dtype="float8_e4m3fn")}, "x is e4m3 and has no scales"),
        ({"x": tokens(4, dtype="float32")}, "x must have dtype bf16 or u16, got f32"),
        ({"x": tokens(5)}, "topk_ids must have shape [5, *]"),
        ({"x": tokens(4, device=1)}, "x is on GPU 1, the group is on GPU 0"),
        ({"topk_weights": FakeArray((4, 3), "float32")}, "topk_weights must have shape [4, 2]"),
        ({"topk_ids": FakeArray((4, 2), "int32", strides=(1, 4))}, "topk_ids must be contiguous"),
        ({"handle": object()}, "topk_ids and topk_weights are those of the handle's dispatch"),
        ({"workspace": 3}, "workspace must be a GroupWorkspace of the group"),
    ],
)
def test_dispatch_refuses(launches, changes, text):
    assert text in refusal(lambda: dispatch(**of_process(4, **changes)))
    assert not launches


def test_fp8_tokens_stay_fp8(launches):
    x = tokens(4, dtype="float8_e4m3fn"), FakeArray((4, 4), "float32")
    assert "which stays so" in refusal(lambda: dispatch(**of_process(4, x=x, format="bf16")))


def test_ranks_of_a_local_group_are_alike(launches):
    given = arguments(3, 3)
    given["x"][1] = tokens(3, 1024)
    assert "hidden is 512 on rank 0, 1024 on rank 1" in refusal(lambda: dispatch(**given))
    given["x"] = given["x"][:1]
    assert "x must be a list with an item for each of the 2 ranks" in refusal(
        lambda: dispatch(**given)
    )


def test_one_rank_is_refused(launches):
    assert "group has one rank" in refusal(lambda: dispatch(**arguments(3)))


def test_a_handle_brings_all_that_says_how_tokens_go(launches):
    first = of_process(4)
    handle = dispatch(**first)
    given = first | {"topk_ids": None, "topk_weights": None, "num_experts": None, "handle": handle}
    given["max_num_tokens"] = None
    dispatch(**given)
    dispatch(**given | {"num_experts": EXPERTS, "layout": "tokens", "format": "bf16"})
    assert launches[1][:2] == launches[2][:2] == launches[0][:2]
    values = values_of(launches[1][-1], 0)
    assert values["is_cached"] and not values["topk_ids"]
    assert values["places"] == values_of(launches[0][-1], 0)["places"]
    for changes, text in (
        ({"layout": "experts"}, "layout is 'tokens' as at the handle's dispatch, got 'experts'"),
        ({"max_num_tokens": 9}, "max_num_tokens is 64 as at the handle's dispatch, got 9"),
        ({"exact": True}, "the handle's dispatch was not exact"),
        ({"x": tokens(5)}, "x must have shape [4, 512], as at the handle's dispatch, got [5, 512]"),
        ({"x": (tokens(4, dtype="uint8"), FakeArray((4, 4), "float32"))}, "sent bf16"),
        ({"group": Process(), "workspace": None}, "the handle is of another group's dispatch"),
    ):
        call = given | changes
        call["workspace"] = workspace_of(call["group"])
        assert text in refusal(lambda call=call: dispatch(**call))
    message = refusal(lambda: dispatch(**given | {"handle": (handle, None)}), TypeError)
    assert "pass Dispatched.handle" in message


def test_an_exact_handle_stays_exact(launches):
    first = of_process(4, exact=True)
    handle = dispatch(**first)
    again = dispatch(
        tokens(4), handle=handle, **{n: first[n] for n in ("group", "workspace", "stream")}
    )
    assert again is handle and handle.room == (5, 7)
    assert not values_of(launches[1][-1], 0)["host_received"]


def test_handles_are_of_their_rank_and_dispatch(launches):
    given = arguments(3, 3)
    handles, other = dispatch(**given), dispatch(**given, layout="experts")
    options = {"group": given["group"], "workspace": given["workspace"], "stream": 5}
    y = [tokens(900), tokens(900)]
    message = refusal(lambda: combine(y, handles[::-1], **options))
    assert "the handle is of rank 1, this is rank 0" in message
    assert "different dispatches" in refusal(lambda: combine(y, [handles[0], other[1]], **options))
    given |= {"topk_ids": None, "topk_weights": None, "handle": [handles[0], None]}
    assert "for all ranks of a LocalGroup or for none" in refusal(lambda: dispatch(**given))


def test_combine(launches):
    given = of_process(4)
    handle = dispatch(**given)
    out = tokens(4, ptr=1 << 27)
    options = {"group": given["group"], "workspace": given["workspace"], "stream": 5}
    bias = tokens(4, ptr=1 << 28), tokens(4, strides=(1024, 1), ptr=1 << 29)
    assert combine(tokens(256), handle, out=out, bias=bias, weighted=False, **options) is out
    plan, bound, _, launch = launches[1]
    assert (plan.name, bound) == ("combine", 64)
    values = values_of(launch, 0)
    assert (values["y"], values["bias_0"], values["bias_1"]) == (1 << 27, 1 << 28, 1 << 29)
    assert (values["bias_0_stride"], values["bias_1_stride"]) == (1024, 2048)
    assert values["num_tokens"] == 4 and not values["is_weighted"]
    for changes, text in (
        ({"y": tokens(256, 1024)}, "y must have shape [*, 512]"),
        ({"y": tokens(255)}, "y must have the 256 rows of Dispatched.x, got 255"),
        ({"out": tokens(5)}, "out must have shape [4, 512]"),
        ({"bias": tokens(3)}, "bias must have shape [4, 512]"),
        ({"bias": (out, out, out)}, "bias must be one array or two, got 3"),
    ):
        call = {"y": tokens(256), "handle": handle, "out": out} | options | changes
        assert text in refusal(lambda call=call: combine(**call))
    call = {"y": tokens(256), "handle": 3, "out": out} | options
    assert "handle must be the DispatchHandle" in refusal(lambda: combine(**call), TypeError)


def test_out_is_of_the_callers_library(launches, monkeypatch):
    made = tokens(4, ptr=1 << 27)
    monkeypatch.setattr(transfer_arguments.families, "empty_rows", lambda *_: made)
    given = of_process(4)
    handle = dispatch(**given)
    options = {"group": given["group"], "workspace": given["workspace"], "stream": 5}
    assert combine(tokens(256), handle, **options) is made
