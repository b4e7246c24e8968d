"""Groups of ranks without a GPU: ranks are threads or processes, memory is that of files."""

import ctypes
import os
import re
import select
import signal
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
from memfd_device import PAGE, MemfdDevice, MemfdIpc, MemfdMapping, MemfdVmm
from process_ranks import run_ranks, values
from stand_in import differences as stand_in_differences
from thread_ranks import refused, run_threads

from jitmoe import (
    DriverError,
    GroupWorkspace,
    LocalGroup,
    NcclGroup,
    PeerGroup,
    RankError,
    RankMismatch,
    mega_moe,
)
from jitmoe.run import peer_group, shared_memory
from jitmoe.run.ranks import difference, name_ranks

HANDLES = ("vmm", "ipc")


@pytest.fixture
def devices(monkeypatch):
    """Stand-ins by device number, each rank's its own rank number in these tests."""
    devices = {number: MemfdDevice(number) for number in range(4)}
    monkeypatch.setattr(peer_group, "SharingDevice", devices.__getitem__)
    yield devices
    assert not any(device.num_mapped for device in devices.values())


def make_group(rank, all_gather, num_ranks=3, **options) -> PeerGroup:
    return PeerGroup(rank, num_ranks, all_gather, device=rank, **options)


@pytest.mark.parametrize(
    "values, text",
    [
        ([4], None),
        (["a", "a", "a"], None),
        ([4, 8], "4 on rank 0, 8 on rank 1"),
        ([8, 8, 4], "4 on rank 2, 8 on the others"),
        ([8, 4, 4, 8, 4, 4, 9], "8 on ranks 0 and 3, 9 on rank 6, 4 on the others"),
        ([[1], [2], [1], [2]], "[1] on ranks 0 and 2, [2] on ranks 1 and 3"),
    ],
)
def test_who_differs(values, text):
    assert difference(values) == text


def test_long_values_are_cut():
    assert len(difference(["x" * 1000, "y" * 1000])) < 200
    assert name_ranks([5, 0, 2]) == "ranks 0, 2 and 5"


def test_local_group_is_alone():
    with LocalGroup(64, device=3) as group:
        assert (group.num_ranks, group.ranks, group.device) == (64, tuple(range(64)), 3)
        group.agree("sizes", hidden=1)
        group.barrier()
    for num_ranks in (0, 65, -1, "2", 1.0):
        with pytest.raises(ValueError, match="num_ranks must be an int from 1 to 64, got"):
            LocalGroup(num_ranks, device=0)


def test_stand_ins_have_the_methods_of_the_real():
    for stand_in, real in (
        (MemfdMapping, shared_memory.Mapping),
        (MemfdVmm, shared_memory.VmmMemory),
        (MemfdIpc, shared_memory.IpcMemory),
        (MemfdDevice, shared_memory.SharingDevice),
    ):
        found = stand_in_differences(stand_in, real)
        assert not [text for text in found if "__init__" not in text and " do" not in text], found


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def mark(rank: int, peer: int) -> bytes:
    return bytes([16 * rank + peer]) * 100


def write_to_all(rank, num_ranks, all_gather, handles):
    """Every rank writes to every rank, and reads at its own what the others wrote there."""
    peer_group.SharingDevice = MemfdDevice
    files = len(os.listdir("/proc/self/fd"))
    with PeerGroup(rank, num_ranks, all_gather, device=0, handles=handles) as group:
        memory = group.allocate(num_ranks * 100 + PAGE)
        more = group.allocate(1)  # one at a time is not all there may be
        assert memory.num_bytes == num_ranks * 100 + PAGE and len(set(memory.bases)) == num_ranks
        started = [ctypes.string_at(base, memory.num_bytes) for base in memory.bases]
        group.barrier()
        for peer, base in enumerate(memory.bases):
            write(base + 100 * rank, mark(rank, peer))
        group.barrier()
        got = [ctypes.string_at(base, 100 * num_ranks) for base in memory.bases]
        group.barrier()
        memory.close()
        memory.close()
        assert memory.bases == () and len(more.bases) == num_ranks
    assert more.bases == ()
    assert len(os.listdir("/proc/self/fd")) == files
    return group.handles, group.ranks, not any(map(any, started)), got


@pytest.mark.parametrize("handles, num_ranks", [("vmm", 4), ("ipc", 2), (None, 1)])
def test_processes_share_memory(handles, num_ranks):
    everywhere = [b"".join(mark(r, peer) for r in range(num_ranks)) for peer in range(num_ranks)]
    results = values(run_ranks(write_to_all, num_ranks, handles))
    for rank, result in enumerate(results):
        assert result == (handles or "vmm", (rank,), True, everywhere)


def dying(rank, num_ranks, all_gather):
    peer_group.SharingDevice = MemfdDevice
    group = PeerGroup(rank, num_ranks, all_gather, device=0)
    memory = group.allocate(100)
    write(memory.bases[rank], mark(rank, rank))
    ends = os.pidfd_open(all_gather(os.getpid())[1])
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    select.select([ends], [], [])
    got = ctypes.string_at(memory.bases[1], 100)
    group.close()
    return got


def test_memory_of_a_process_that_died():
    first, second, third = run_ranks(dying, 3)
    assert values([first, third]) == [mark(1, 1)] * 2
    assert second.error and second.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    "fact, value, text",
    [
        ("host", "elsewhere", "host is 'elsewhere' on rank 1, .* on the others; .* one host"),
        ("jitmoe", "9.9", "jitmoe is '9.9' on rank 1, .* on the others; install the same version"),
        ("num_ranks", 4, "num_ranks is 4 on rank 1, 3 on the others; pass the same"),
        ("user", -5, "user is -5 on rank 1, .* on the others; run all as one user"),
        ("handles", "ipc", "handles is 'ipc' on rank 1, 'vmm' on the others; pass the same"),
        ("has_vmm", False, 'the GPU of rank 1 cannot share memory with handles="vmm"; take'),
        ("rank", 2, r"rank 2 occurs 2 times among 3 ranks \(at the places of ranks 1 and 2\)"),
    ],
)
def test_ranks_that_form_no_group(devices, fact, value, text):
    def run(rank, all_gather):
        def gather(message):
            what, (facts, failure) = message
            return all_gather((what, (facts | ({fact: value} if rank == 1 else {}), failure)))

        make_group(rank, gather, handles="vmm")

    assert re.match(text, refused(RankMismatch, run_threads(run, 3)))


def test_gpus_out_of_reach(devices):
    devices[0].unreachable, devices[2].unreachable = {"GPU 1", "GPU 2"}, {"GPU 0"}
    text = refused(RankMismatch, run_threads(make_group, 3))
    assert text.startswith(
        "GPUs must access each other's memory, and that of rank 0 cannot access that of ranks 1 "
        "and 2, that of rank 2 cannot access that of rank 0; take"
    )


def test_ipc_where_one_gpu_has_no_vmm(devices):
    devices[1].has_vmm = False
    groups = run_threads(make_group, 3)
    assert [group.handles for group in groups] == ["ipc"] * 3


def test_all_gather_is_held_to_its_word(devices):
    backwards = run_threads(lambda rank, gather: make_group(rank, lambda o: gather(o)[::-1]), 3)
    assert "by rank, gave those of ranks [2, 1, 0]" in refused(RankMismatch, backwards)
    for gather, text in (
        (lambda obj: [obj], "all_gather gave 1 objects to rank 0 of 3"),
        (lambda obj: [None] * 3, "objects that no PeerGroup sent"),
    ):
        with pytest.raises(RankMismatch, match=text):
            make_group(0, gather)


@pytest.mark.parametrize(
    "rank, options, text",
    [
        (-1, {}, "ValueError: rank must be an int from 0 to 2, got -1"),
        (3, {}, "ValueError: rank must be an int from 0 to 2, got 3"),
        (1, {"handles": "fd"}, """ValueError: handles must be "vmm", "ipc" or None, got 'fd'"""),
        (1, {"device": 7}, "KeyError: 7"),
    ],
)
def test_a_rank_that_cannot_join_is_told_by_all(devices, rank, options, text):
    def run(place, all_gather):
        if place != 1:
            return make_group(place, all_gather)
        return PeerGroup(rank, 3, all_gather, **{"device": 1} | options)

    answers = run_threads(run, 3)
    assert refused(RankError, answers) == f"could not join the group: rank 1: {text}"
    assert [bool(answer.__cause__) for answer in answers] == [False, True, False]


def test_what_fails_on_several_ranks_alike_is_said_once(devices):
    answers = run_threads(
        lambda rank, gather: PeerGroup(rank, 3, gather, device=rank if rank == 1 else 7), 3
    )
    assert refused(RankError, answers) == "could not join the group: ranks 0 and 2: KeyError: 7"


def test_arguments_that_make_no_group(monkeypatch):
    with pytest.raises(TypeError, match="all_gather of a PeerGroup must be a function .* got None"):
        PeerGroup(0, 1, None)
    with pytest.raises(TypeError, match="communicator must be of nccl4py, got int; .*from_mpi"):
        NcclGroup(3)
    for make in (GroupWorkspace, lambda group: mega_moe(1, 2, 3, 4, group=group)):
        with pytest.raises(TypeError, match="group must be a LocalGroup, .* got int; make one"):
            make(2)
    monkeypatch.setattr("jitmoe.run.symmetric.num_devices", lambda: 0)
    with pytest.raises(DriverError, match="a group needs a GPU and finds none; .* emulate --rank"):
        LocalGroup(2)


def test_agreement(devices):
    def run(rank, all_gather):
        group = make_group(rank, all_gather)
        group.agree("the layer", hidden=512, plan="abc")
        heard = []
        for facts in (
            {"hidden": 512 + (rank == 1), "plan": "abc"},
            {"hidden": 512, "plan": f"abc{rank % 2}", "top_k": rank},
            {"hidden": 512} if rank else {},
        ):
            with pytest.raises(RankMismatch) as caught:
                group.agree("the layer", **facts)
            heard.append(str(caught.value))
        group.barrier()
        return heard

    first, *others = run_threads(run, 3)
    assert others == [first, first]
    assert first == [
        "ranks differ in the layer: hidden is 513 on rank 1, 512 on the others; "
        "pass the same on all ranks",
        "ranks differ in the layer: plan is 'abc1' on rank 1, 'abc0' on the others; "
        "top_k is 0 on rank 0, 1 on rank 1, 2 on rank 2; pass the same on all ranks",
        "ranks differ in the layer: hidden is missing on rank 0, 512 on the others; "
        "pass the same on all ranks",
    ]


def test_calls_out_of_order(devices):
    def run(rank, all_gather):
        group = make_group(rank, all_gather)
        group.barrier() if rank else group.allocate(8)

    text = refused(RankMismatch, run_threads(run, 3))
    assert text.startswith("the call is 'agree on allocate' on rank 0, 'barrier' on the others;")


def test_sizes_that_cannot_be_allocated(devices):
    def run(rank, all_gather):
        group = make_group(rank, all_gather)
        with pytest.raises(ValueError, match="num_bytes must be an int of at least 1, got 0"):
            group.allocate(0)
        group.allocate(64 << rank)

    text = refused(RankMismatch, run_threads(run, 3))
    assert "allocate: num_bytes is 64 on rank 0, 128 on rank 1, 256 on rank 2;" in text


@pytest.mark.parametrize("handles", HANDLES)
@pytest.mark.parametrize("call", ["create", "export", "open"])
def test_an_allocation_that_fails_on_one_rank_fails_on_all(devices, handles, call):
    """Nothing is left mapped, no file open, and the group goes on."""
    files = len(os.listdir("/proc/self/fd"))
    devices[2].broken = {call}

    def run(rank, all_gather):
        group = make_group(rank, all_gather, handles=handles)
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            group.allocate(1000)
        assert time.monotonic() - start < 15, "waited for one that had failed"
        assert not devices[rank].num_mapped
        assert isinstance(caught.value.__cause__, MemoryError) or rank != 2
        group.barrier()
        devices[2].broken = set()
        group.allocate(1000)
        group.close()
        return str(caught.value)

    answers = run_threads(run, 3)
    assert all(f"rank 2: MemoryError: no {call} today" in answer for answer in answers), answers
    assert len(set(answers)) == 1 and answers[0].startswith("could not ")
    assert len(os.listdir("/proc/self/fd")) == files


def test_all_memory_is_closed_even_if_that_fails(devices):
    def run(rank, all_gather):
        group = make_group(rank, all_gather, num_ranks=2)
        group.allocate(1), group.allocate(1)
        group.barrier()
        devices[rank].broken = {"synchronize"}
        with pytest.raises(MemoryError, match="no synchronize today"):
            group.close()

    assert run_threads(run, 2) == [None, None]


class Communicator:
    """As mpi4py's, of one rank."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.mark.parametrize(
    "attributes",
    [
        {"rank": 0, "size": 1},
        {"Get_rank": lambda: 0, "Get_size": lambda: 1},
        {"rank": lambda: 0, "size": lambda: 1},
    ],
)
def test_any_communicator(devices, attributes):
    communicator = Communicator(allgather=lambda obj: [obj], **attributes)
    group = PeerGroup.from_any(communicator, device=2, handles="ipc")
    assert (group.rank, group.num_ranks, group.device, group.handles) == (0, 1, 2, "ipc")


def test_no_communicator(devices):
    for attributes in ({"rank": 0, "size": 1}, {"allgather": list, "size": 1}, {"allgather": list}):
        with pytest.raises(TypeError, match="a communicator must have allgather, and rank and"):
            PeerGroup.from_any(Communicator(**attributes))


def test_mpi(devices, monkeypatch):
    world = Communicator(allgather=lambda obj: [obj], Get_rank=lambda: 0, Get_size=lambda: 1)
    module = ModuleType("mpi4py")
    module.MPI = SimpleNamespace(COMM_WORLD=world)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    assert PeerGroup.from_mpi(device=1).num_ranks == 1
    assert PeerGroup.from_mpi(world, device=1).device == 1


def with_torch(rank, num_ranks, all_gather, rendezvous):
    import torch.distributed as dist

    peer_group.SharingDevice = MemfdDevice
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"):
        PeerGroup.from_torch(device=0)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    with PeerGroup.from_torch(device=0) as group:
        memory = group.allocate(100)
        write(memory.bases[1 - rank], mark(rank, 1 - rank))
        group.barrier()
        got = ctypes.string_at(memory.bases[rank], 100)
        group.barrier()
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="this process is no rank of the torch.distributed"):
            PeerGroup.from_torch(alone, device=0)
    dist.destroy_process_group()
    return group.rank, got


def test_torch(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch")
    results = values(run_ranks(with_torch, 2, str(tmp_path / "rendezvous"), timeout_s=120))
    assert results == [(0, mark(1, 0)), (1, mark(0, 1))]
