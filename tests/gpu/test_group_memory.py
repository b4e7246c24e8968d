"""Symmetric memory on one GPU: of virtual ranks, and of processes that share the GPU."""

import os
import re
import select
import signal

import pytest
from process_ranks import run_ranks, values
from rank_memory import array, leaking, too_much, write_to_all

from jitmoe import LocalGroup, PeerGroup

TIMEOUT_S = 180.0  # processes that start share the GPU, and CuPy compiles its kernels in each


def test_local_memory():
    import cupy

    with LocalGroup(8) as group:
        assert group.device == cupy.cuda.Device().id
        memory = group.allocate(1_000_003)
        assert memory.num_bytes == 1_000_003 and len(memory.bases) == 8
        arrays = [array(memory, base, memory.num_bytes, group.device) for base in memory.bases]
        assert not any(int(a.any()) for a in arrays)
        for rank, a in enumerate(arrays):
            a.fill(rank + 1)
        assert all(bool((a == rank + 1).all()) for rank, a in enumerate(arrays))
        assert all(base % 256 == 0 for base in memory.bases)
        memory.close()
        memory.close()
        assert memory.bases == ()


def test_local_memory_that_is_too_large():
    with pytest.raises(MemoryError, match="4 ranks of .* bytes do not fit on GPU"):
        LocalGroup(4).allocate(1 << 45)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("handles", ["vmm", "ipc", None])
def test_processes_share_memory(handles, num_ranks):
    num_bytes = num_ranks * ((3 << 20) + 5)  # no multiple of any granularity
    wanted = [[[16 * (r + 1) + peer] for r in range(num_ranks)] for peer in range(num_ranks)]
    arguments = True, handles, num_bytes
    results = values(run_ranks(write_to_all, num_ranks, *arguments, timeout_s=TIMEOUT_S))
    for kind, started, got in results:
        assert kind == (handles or "vmm")
        assert started == [0] * num_ranks
        assert got == wanted


def dying(rank, num_ranks, all_gather, handles):
    import cupy

    group = PeerGroup(rank, num_ranks, all_gather, device=0, handles=handles)
    memory = group.allocate(1 << 20)
    own = array(memory, memory.bases[rank], memory.num_bytes, 0)
    own.fill(rank + 1)
    cupy.cuda.Device().synchronize()
    ends = os.pidfd_open(all_gather(os.getpid())[1])
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert select.select([ends], [], [], 60)[0]
    readable = [rank]
    if handles == "vmm":  # CUDA says nothing of IPC memory whose owner has gone
        readable = range(num_ranks)
    got = [
        cupy.unique(array(memory, memory.bases[r], memory.num_bytes, 0)).tolist() for r in readable
    ]
    group.close()
    assert int(cupy.arange(10).sum()) == 45  # the context is sound
    return got


@pytest.mark.parametrize("handles", ["vmm", "ipc"])
def test_memory_of_a_process_that_died(handles):
    first, second, third = run_ranks(dying, 3, handles, timeout_s=TIMEOUT_S)
    everywhere = [[1], [2], [3]]
    alone = [[[1]], [[3]]]
    assert values([first, third]) == ([everywhere] * 2 if handles == "vmm" else alone)
    assert second.error and second.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("handles", ["vmm", "ipc"])
def test_memory_that_is_too_large(handles):
    (text, is_zero), other = values(run_ranks(too_much, 2, True, handles, timeout_s=TIMEOUT_S))
    assert other == (text, is_zero) and is_zero == [True, True]
    who = "(ranks 0 and 1|rank 0: DriverError: cuMem.*; rank 1)"
    assert re.match(f"could not allocate {1 << 45:,} bytes: {who}: DriverError: cuMem", text), text


@pytest.mark.parametrize("handles", ["vmm", "ipc"])
def test_closed_memory_is_free_again(handles):
    lost = values(run_ranks(leaking, 2, True, handles, timeout_s=TIMEOUT_S))
    assert max(lost) < 1 << 30, "4 GiB were allocated on each of two ranks and closed"
