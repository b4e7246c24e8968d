"""Symmetric memory of ranks that are processes: functions for process_ranks.run_ranks, which return
what the tests judge. With `one_gpu` all share GPU 0, else rank r has GPU r; for `kind` see
group_kinds.py.
"""

from __future__ import annotations

import pytest
from group_kinds import make_group

from jitmoe import RankError, RankMismatch


def array(memory, address: int, num_bytes: int, device: int):
    """A CuPy array of the bytes at an address in symmetric memory."""
    import cupy

    span = cupy.cuda.UnownedMemory(address, num_bytes, memory, device)
    return cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(span, 0))


def use_device(rank: int, one_gpu: bool) -> int:
    """The rank's GPU, current from now on."""
    import cupy

    device = 0 if one_gpu else rank
    cupy.cuda.Device(device).use()
    return device


def write_to_all(rank, num_ranks, all_gather, one_gpu, kind, num_bytes):
    """Every rank writes a part of every rank's memory, and reads all of all."""
    import cupy

    device = use_device(rank, one_gpu)
    with make_group(kind, rank, num_ranks, all_gather, device) as group:
        memory, more = group.allocate(num_bytes), group.allocate(1)
        assert memory.num_bytes == num_bytes and len(set(memory.bases)) == num_ranks
        arrays = [array(memory, base, num_bytes, device) for base in memory.bases]
        started = [int(a.any()) for a in arrays]
        group.barrier()
        share = num_bytes // num_ranks
        for peer, a in enumerate(arrays):
            a[rank * share : (rank + 1) * share] = 16 * (rank + 1) + peer
        cupy.cuda.Device().synchronize()
        group.barrier()
        got = [
            [cupy.unique(a[r * share : (r + 1) * share]).tolist() for r in range(num_ranks)]
            for a in arrays
        ]
        group.barrier()
        memory.close()
        assert memory.bases == () and len(more.bases) == num_ranks
        group.barrier()
    return getattr(group, "handles", kind), started, got


def too_much(rank, num_ranks, all_gather, one_gpu, kind):
    """An allocation that the GPU cannot hold fails on all; one that fits succeeds after it."""
    device = use_device(rank, one_gpu)
    with make_group(kind, rank, num_ranks, all_gather, device) as group:
        with pytest.raises(RankError) as caught:
            group.allocate(1 << 45)
        with pytest.raises(RankMismatch, match="num_bytes is 1 on rank 0, 2 on rank 1"):
            group.allocate(1 + rank)
        memory = group.allocate(1 << 20)
        is_zero = [not int(array(memory, base, 1 << 20, device).any()) for base in memory.bases]
        group.barrier()
    return str(caught.value), is_zero


def leaking(rank, num_ranks, all_gather, one_gpu, kind):
    """What free memory is less by after allocations that were closed."""
    import cupy

    device = use_device(rank, one_gpu)
    with make_group(kind, rank, num_ranks, all_gather, device) as group:
        group.allocate(1 << 20).close()
        group.barrier()
        before = all_gather(cupy.cuda.Device().mem_info[0])[0]
        for _ in range(4):
            memory = group.allocate(1 << 30)
            group.barrier()
            memory.close()
            group.barrier()
        after = all_gather(cupy.cuda.Device().mem_info[0])[0]
    return before - after
