"""NcclGroup without a GPU: ranks are threads or processes, NCCL is a stand-in that is held to the
signatures of nccl4py.
"""

import ctypes
import os
import re
import select
import signal
import sys
import tempfile
from functools import partial
from importlib.metadata import distributions
from types import ModuleType, SimpleNamespace

import nccl_stand_in
import pytest
from process_ranks import run_ranks, values
from stand_in import differences, parameters
from thread_ranks import refused, run_threads

from jitmoe import NcclGroup, PeerGroup, RankError, RankMismatch, doctor
from jitmoe.jit.nvrtc import ToolchainError
from jitmoe.run import nccl_group, nccl_library, nccl_rail


def use_stand_in(directory) -> None:
    """In this process, whose communicators meet below `directory`."""
    nccl_stand_in.install()
    tempfile.tempdir = str(directory)
    nccl_group.SharingDevice = nccl_stand_in.machine.gpu


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """The stand-in's, new; rank r has GPU r in these tests. Nothing is left mapped on it."""
    machine = nccl_stand_in.Machine()
    for name in ("nccl", "nccl.core"):
        monkeypatch.setitem(sys.modules, name, None)  # what is there comes back
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(nccl_group, "SharingDevice", None)
    monkeypatch.setattr(nccl_stand_in, "machine", machine)
    use_stand_in(tmp_path)
    yield machine
    assert not any(gpu.num_mapped for gpu in machine.gpus.values())


def connect(rank, all_gather, num_ranks=3, **options) -> NcclGroup:
    return NcclGroup.connect(rank, num_ranks, all_gather, **{"device": rank} | options)


def own_communicator(rank, num_ranks, all_gather):
    """A communicator as a caller makes it."""
    unique = all_gather(bytes(nccl_stand_in.get_unique_id()))[0]
    communicator = nccl_stand_in.Communicator()
    with nccl_stand_in.machine.gpu(rank).current():
        communicator.initialize(num_ranks, rank, nccl_stand_in.UniqueId.from_bytes(unique))
    return communicator


def real_nccl4py():
    return pytest.importorskip("nccl.core", reason="needs nccl4py: pip install '.[nccl]'")


def test_the_stand_in_has_the_signatures_of_nccl4py():
    core = real_nccl4py()
    for kind in ("Communicator", "UniqueId", "RegisteredWindowHandle", "DevCommResource"):
        found = differences(getattr(nccl_stand_in, kind), getattr(core, kind))
        found = [text for text in found if kind == "Communicator" or "__init__" not in text]
        found = [text for text in found if " has no _node" not in text]
        assert not found, found
    for name in ("get_unique_id", "get_version", "mem_alloc", "mem_free"):
        assert parameters(getattr(nccl_stand_in, name)) == parameters(getattr(core, name)), name
    for kind in ("WindowFlag", "NcclGinType", "NcclGinConnectionType"):
        for value in getattr(nccl_stand_in, kind):
            assert getattr(core, kind)[value.name] == value
    wanted = set(nccl_stand_in.NCCLDevCommRequirements.__dataclass_fields__)
    assert wanted <= set(core.NCCLDevCommRequirements.__dataclass_fields__)
    assert {"n_ranks", "rank", "stride"} <= set(core.NCCLTeam.__dataclass_fields__)
    assert {"version", "path"} <= set(core.LibraryInfo.__dataclass_fields__)
    assert {"libnccl", "nccl_bindings"} <= set(core.VersionInfo.__dataclass_fields__)


def test_bytes_of_a_real_unique_id_make_it_again():
    core = real_nccl4py()
    sent = bytes(range(128))
    assert bytes(core.UniqueId.from_bytes(sent)) == sent


def test_bytes_of_a_real_device_communicator_are_all_of_it():
    real_nccl4py()
    from nccl.bindings import nccl as bindings

    made = bindings.DevComm()
    made.gin_context_count = 7
    assert len(bytes(made)) == bindings.dev_comm_dtype.itemsize
    copy = bindings.DevComm.from_buffer(bytes(made))
    assert copy.gin_context_count == 7 == made.gin_context_count


def test_the_release_of_a_real_device_library():
    wheels = [d for d in distributions() if d.name.startswith("nvidia-nccl-cu")]
    try:
        found = nccl_rail._device_release()
    except ToolchainError as error:
        pytest.skip(str(error))
    assert ".".join(map(str, found)) in [wheel.version for wheel in wheels]


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def mark(rank: int, peer: int) -> bytes:
    return bytes([16 * rank + peer]) * 100


def write_to_all(rank, num_ranks, all_gather, directory, is_own):
    """Every rank writes to every rank, and reads at its own what the others wrote there."""
    use_stand_in(directory)
    files = len(os.listdir("/proc/self/fd"))
    if is_own:
        group = NcclGroup(own_communicator(rank, num_ranks, all_gather), all_gather)
    else:
        group = connect(rank, all_gather, num_ranks)
    with group:
        memory, more = group.allocate(num_ranks * 100 + 5), group.allocate(1)
        assert memory.num_bytes == num_ranks * 100 + 5 and len(set(memory.bases)) == num_ranks
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
    assert more.bases == () and len(os.listdir("/proc/self/fd")) == files
    return (group.rank, group.ranks, group.device), not any(map(any, started)), got


@pytest.mark.parametrize("num_ranks, is_own", [(4, False), (2, True), (1, False)])
def test_processes_share_memory(num_ranks, is_own, tmp_path):
    everywhere = [b"".join(mark(r, peer) for r in range(num_ranks)) for peer in range(num_ranks)]
    results = values(run_ranks(write_to_all, num_ranks, str(tmp_path), is_own))
    for rank, result in enumerate(results):
        assert result == ((rank, (rank,), rank), True, everywhere)


def dying(rank, num_ranks, all_gather, directory):
    use_stand_in(directory)
    group = connect(rank, all_gather, num_ranks)
    memory = group.allocate(100)
    write(memory.bases[rank], mark(rank, rank))
    ends = os.pidfd_open(all_gather(os.getpid())[1])
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    select.select([ends], [], [])
    got = ctypes.string_at(memory.bases[1], 100)
    group.close()
    return got, nccl_stand_in.machine.gpu(rank).events[-1]


def test_memory_of_a_process_that_died(tmp_path):
    first, second, third = run_ranks(dying, 3, str(tmp_path))
    assert values([first, third]) == [(mark(1, 1), "abort")] * 2
    assert second.error and second.exit_code == -signal.SIGKILL


def test_memory_is_zero_before_others_reach_it_and_unmapped_before_it_is_freed(machine):
    def run(rank, all_gather):
        with connect(rank, all_gather) as group:
            group.allocate(100)
            machine.gpu(rank).events.append("allocated")
        group.close()

    assert run_threads(run, 3) == [None] * 3
    for gpu in machine.gpus.values():
        assert gpu.events == [
            *("zero", "allocated", "synchronize", "close window", "free", "abort"),
        ]


def test_a_communicator_of_the_callers_outlives_the_group(machine):
    def run(rank, all_gather):
        communicator = own_communicator(rank, 3, all_gather)
        with NcclGroup(communicator, all_gather) as group:
            memory = group.allocate(100)
            (window,) = communicator.windows
            assert memory.bases == tuple(mapping.address for mapping in window.mappings)
        assert communicator.is_valid and memory.bases == ()
        late = NcclGroup(communicator, all_gather)
        late.allocate(100)
        late.barrier()
        communicator.abort()  # its windows go with it
        late.close()

    assert run_threads(run, 3) == [None] * 3


def test_several_ranks_need_an_all_gather(machine):
    def run(rank, all_gather):
        return NcclGroup(own_communicator(rank, 2, all_gather))

    text = refused(ValueError, run_threads(run, 2))
    assert text.startswith("a NcclGroup of 2 ranks needs all_gather, got None; pass one")

    def alone(rank, all_gather):
        with NcclGroup(own_communicator(rank, 1, all_gather)) as group:
            return len(group.allocate(10).bases)

    assert run_threads(alone, 1) == [1]


def test_two_ranks_on_one_gpu(machine):
    text = refused(
        RankMismatch, run_threads(lambda rank, gather: connect(rank, gather, device=rank % 2), 3)
    )
    assert text.startswith("ranks 0 and 2 have the same GPU, and NCCL takes one rank on each; give")


@pytest.mark.parametrize(
    "num_domains, nodes, said",
    [
        (2, (), "2 NVLink domains: ranks 0 and 2; ranks 1 and 3; a group"),
        (1, (3, 1), "2 NVLink domains: ranks 0, 1 and 2; rank 3; a group"),
        (1, (1, 2, 1), "3 NVLink domains: rank 0; ranks 1 and 2; rank 3; a group"),
    ],
)
def test_domains_that_are_no_nodes(machine, num_domains, nodes, said):
    machine.num_domains, machine.nodes = num_domains, nodes
    text = refused(
        RankMismatch, run_threads(lambda rank, gather: connect(rank, gather, num_ranks=4), 4)
    )
    assert text == (
        f"NCCL finds {said} takes as many ranks on each, numbered one domain after the other: "
        "number them so, or make a group of each"
    )
    assert all(gpu.events == ["abort"] for gpu in machine.gpus.values())


@pytest.fixture
def nodes(machine, monkeypatch, tmp_path):
    """The machine with two nodes of two ranks, and a device library of the bindings' version."""
    (tmp_path / "nccl" / "include").mkdir(parents=True)
    header = tmp_path / "nccl" / "include" / "nccl.h"
    header.write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n")
    library = tmp_path / "nccl" / "lib" / "libnccl_device.ltoir"
    monkeypatch.setattr(nccl_rail.link, "find", {"nccl_device": library}.__getitem__)
    machine.nodes = (2, 2)
    return machine


def connect_nodes(rank, all_gather) -> NcclGroup:
    return connect(rank, all_gather, num_ranks=4)


def test_two_nodes(nodes):
    def run(rank, all_gather):
        with connect_nodes(rank, all_gather) as group:
            memory = group.allocate(400)
            node = rank // 2
            mapped = [bool(base) for base in memory.bases]
            group.barrier()
            peer = 2 * node + 1 - rank % 2
            write(memory.bases[peer], mark(rank, peer))
            group.barrier()
            got = ctypes.string_at(memory.bases[rank], 100)
            block = ctypes.string_at(memory.rail.comm, 64 + len(b"device communicator"))
            (window,) = group._communicator.windows
            rail = memory.rail
            assert (rail.window, rail.offset) == (window.handle, 0) and rail.window
            memory.close()
            assert memory.rail is None
            nodes.gpu(rank).events.append("closed memory")
        counts = group.num_nodes, group.ranks_per_node
        return counts, mapped, got == mark(peer, rank), block

    for rank, (counts, mapped, is_right, block) in enumerate(run_threads(run, 4)):
        assert counts == (2, 2) and is_right
        assert mapped == [peer // 2 == rank // 2 for peer in range(4)]
        assert block[:4] == (3).to_bytes(4, "little") and not any(block[4:64])
        assert block[64:] == b"device communicator"
        assert nodes.gpu(rank).events == [
            *("zero", "synchronize", "close window", "free", "closed memory"),
            *("synchronize", "close device communicator", "free", "abort"),
        ]


def test_one_node_has_no_rail(machine):
    def run(rank, all_gather):
        with connect(rank, all_gather, num_ranks=2) as group:
            memory = group.allocate(100)
            assert not group._communicator.device_comms
            return group.num_nodes, group.ranks_per_node, memory.rail

    assert run_threads(run, 2) == [(1, 2, None)] * 2


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda machine: setattr(machine, "gin", nccl_stand_in.NcclGinType.NONE),
            "RuntimeError: NCCL finds no GIN between nodes (railed_gin_type is NONE); it needs",
        ),
        (
            lambda machine: setattr(machine, "gin", nccl_stand_in.NcclGinType.EFA_GDA),
            "RuntimeError: GIN is by EFA_GDA, whose signals do not wait",
        ),
        (
            lambda machine: setattr(machine, "bindings", "2.32.4"),
            "RuntimeError: nccl4py asks for a device communicator of NCCL 2.32.4, and the device "
            "library that kernels are linked with is of 2.32.3; pip install "
            "nvidia-nccl-cu12==2.32.4 (-cu13 for CUDA 13), or the nccl4py of 2.32.3",
        ),
    ],
)
def test_nodes_that_nccl_cannot_join(nodes, change, said):
    change(nodes)
    text = refused(RankError, run_threads(connect_nodes, 4))
    assert text.startswith(f"could not reach other nodes by NCCL: ranks 0, 1, 2 and 3: {said}")
    assert all(gpu.events[-1] == "abort" for gpu in nodes.gpus.values())


def test_nodes_and_an_nccl_that_is_too_old(nodes, monkeypatch):
    monkeypatch.setattr(nccl_stand_in, "VERSION", "2.31.4")
    text = refused(RankError, run_threads(connect_nodes, 4))
    assert "NCCL is 2.31.4 (/somewhere/libnccl.so.2), and a NcclGroup over several nodes" in text
    assert "needs 2.32 or later; pip install 'nvidia-nccl-cu13>=2.32'" in text


def test_nodes_without_the_device_library(nodes, monkeypatch):
    def find(name):
        raise ToolchainError(f"no {name} today")

    monkeypatch.setattr(nccl_rail.link, "find", find)
    text = refused(RankError, run_threads(connect_nodes, 4))
    assert "ToolchainError: no nccl_device today" in text


def test_a_device_communicator_that_fails_on_one_rank_fails_on_all(nodes):
    nodes.gpu(2).broken = {"create_dev_comm"}
    text = refused(RankError, run_threads(connect_nodes, 4))
    assert text == (
        "could not connect the nodes by NCCL: rank 2: MemoryError: no create_dev_comm today"
    )
    assert nodes.gpu(0).events == ["synchronize", "close device communicator", "free", "abort"]
    assert nodes.gpu(2).events == ["synchronize", "abort"]


def test_a_device_communicator_without_contexts(nodes):
    nodes.num_contexts = 0
    text = refused(RankError, run_threads(connect_nodes, 4))
    assert "RuntimeError: NCCL made a device communicator without GIN contexts" in text


def test_nccl_that_is_too_old(machine, monkeypatch):
    monkeypatch.setattr(nccl_stand_in, "VERSION", "2.28.9")
    text = refused(RankError, run_threads(connect, 3))
    who = "ranks 0, 1 and 2"
    assert f"{who}: RuntimeError: NCCL is 2.28.9 (/somewhere/libnccl.so.2), and" in text
    assert "a NcclGroup needs 2.29.2 or later; pip install 'nvidia-nccl-cu13>=2.29.2'" in text


def test_versions_of_nccl_that_differ(machine):
    def run(rank, all_gather):
        def gather(message):
            what, (facts, failure) = message
            return all_gather((what, (facts | ({"nccl": "2.30.3"} if rank == 1 else {}), failure)))

        connect(rank, gather)

    text = refused(RankMismatch, run_threads(run, 3))
    assert text.startswith("nccl is '2.30.3' on rank 1, '2.32.3' on the others; have all ranks")


def test_without_nccl4py_or_a_library(machine, monkeypatch):
    monkeypatch.setattr(nccl_stand_in, "get_version", lambda: SimpleNamespace(libnccl=None))
    with pytest.raises(RankError, match="RuntimeError: nccl4py finds no libnccl.so.2; pip install"):
        connect(0, lambda obj: [obj], num_ranks=1)
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(RankError, match=r"a NcclGroup needs nccl4py .*pip install 'jitmoe\[nccl\]"):
        connect(0, lambda obj: [obj], num_ranks=1)


@pytest.mark.parametrize("version, serves", [("2.29.2", True), ("2.29.1", False), ("3.0", True)])
def test_which_versions_serve(machine, monkeypatch, version, serves):
    monkeypatch.setattr(nccl_stand_in, "VERSION", version)
    if serves:
        assert nccl_library.version() == version
    else:
        with pytest.raises(RuntimeError, match=f"NCCL is {re.escape(version)}"):
            nccl_library.version()


def test_a_rank_that_cannot_connect_is_told_by_all(machine):
    machine.gpu(2).broken = {"initialize"}

    def run(rank, all_gather):
        if rank != 2:  # NCCL itself would wait for the other
            machine.gpu(rank).broken = {"initialize"}
        return connect(rank, all_gather)

    text = refused(RankError, run_threads(run, 3))
    assert text.startswith("could not connect the ranks by NCCL: ranks 0, 1 and 2: MemoryError: no")


@pytest.mark.parametrize("call", ["create", "register_window"])
def test_an_allocation_that_fails_on_one_rank_fails_on_all(machine, call):
    """Nothing is left mapped, and the group goes on."""

    def run(rank, all_gather):
        group = connect(rank, all_gather)
        machine.gpu(2).broken = {call}
        group.barrier()
        with pytest.raises(RankError) as caught:
            group.allocate(1000)
        group.barrier()
        machine.gpu(2).broken = set()
        group.barrier()
        group.allocate(1000)
        group.close()
        return str(caught.value)

    answers = run_threads(run, 3)
    assert len(set(answers)) == 1 and f"rank 2: MemoryError: no {call} today" in answers[0]


def test_nccl_without_windows(machine):
    machine.has_windows = False

    def run(rank, all_gather):
        with connect(rank, all_gather) as group:
            group.allocate(1000)

    text = refused(RankError, run_threads(run, 3))
    who = "could not register the memory with NCCL: ranks 0, 1 and 2"
    assert f"{who}: RuntimeError: NCCL made no window" in text


def test_ranks_are_held_to_the_same_calls(machine):
    def run(rank, all_gather):
        with connect(rank, all_gather, num_ranks=2) as group:
            group.agree("the layer", hidden=512)
            group.allocate(8 << rank)

    assert "num_bytes is 8 on rank 0, 16 on rank 1" in refused(RankMismatch, run_threads(run, 2))
    with pytest.raises(RankMismatch, match="objects that no NcclGroup sent"):
        connect(0, lambda obj: [None] * 3)


class World:
    """As an mpi4py communicator, of one rank."""

    rank, size = 0, 1

    def allgather(self, obj):
        return [obj]


def test_mpi_and_any_communicator(machine, monkeypatch):
    module = ModuleType("mpi4py")
    module.MPI = SimpleNamespace(COMM_WORLD=World())
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    for make in (NcclGroup.from_mpi, partial(NcclGroup.from_any, World())):
        with make(device=1) as group:
            assert (group.num_ranks, group.device) == (1, 1)
            assert len(group.allocate(10).bases) == 1


def test_a_communicator_of_nccl4py_gathers_no_objects(machine):
    communicator = own_communicator(0, 1, lambda obj: [obj])
    with pytest.raises(TypeError, match="Communicator has not: pass rank, num_ranks and all_gath"):
        PeerGroup.from_any(communicator)


def with_torch(rank, num_ranks, all_gather, directory):
    import torch.distributed as dist

    use_stand_in(directory)
    rendezvous = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    with NcclGroup.from_torch(device=rank) as group:
        memory = group.allocate(100)
        write(memory.bases[1 - rank], mark(rank, 1 - rank))
        group.barrier()
        got = ctypes.string_at(memory.bases[rank], 100)
        group.barrier()
    dist.destroy_process_group()
    return group.rank, got


def test_torch(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch")
    results = values(run_ranks(with_torch, 2, str(tmp_path), timeout_s=120))
    assert results == [(0, mark(1, 0)), (1, mark(0, 1))]


def test_doctor_knows_nccl(machine, monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: name == "nccl4py")
    (finding,) = doctor._nccl()
    assert (finding.status, finding.text) == ("ok", "NCCL 2.32.3 at /somewhere/libnccl.so.2")
    monkeypatch.setattr(nccl_stand_in, "VERSION", "2.28.9")
    (finding,) = doctor._nccl()
    assert finding.status == "note" and finding.text.startswith("NCCL is 2.28.9")
    monkeypatch.setattr(doctor, "_installed", lambda name: False)
    (finding,) = doctor._nccl()
    assert finding.status == "note" and "jitmoe[nccl]" in finding.remedy
