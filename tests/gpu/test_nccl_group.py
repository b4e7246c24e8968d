"""NcclGroup on one GPU, with NCCL itself: NCCL takes one rank on a GPU, so groups are of one rank.
More ranks: tests/multi_gpu.
"""

import pytest
from group_kinds import skip_without
from process_ranks import run_ranks, values
from rank_layers import run_cases
from rank_memory import array, leaking, use_device, write_to_all

from jitmoe import NcclGroup, RankError

TIMEOUT_S = 170.0


@pytest.fixture(autouse=True)
def _nccl():
    skip_without("nccl")


def run(function, *arguments):
    """What the function returned, run by one rank in a process of its own."""
    (value,) = values(run_ranks(function, 1, *arguments, timeout_s=TIMEOUT_S))
    return value


def test_memory_of_a_window():
    num_bytes = (3 << 20) + 5  # no multiple of any granularity
    assert run(write_to_all, True, "nccl", num_bytes) == ("nccl", [0], [[[16]]])


def reused(rank, num_ranks, all_gather):
    """Whether memory that was written to and given back is zero when it comes again."""
    import cupy

    device = use_device(rank, True)
    with NcclGroup.connect(rank, num_ranks, all_gather, device) as group:
        found = []
        for _ in range(3):
            memory = group.allocate(64 << 20)
            (base,) = memory.bases
            assert base % 256 == 0
            own = array(memory, base, memory.num_bytes, device)
            found.append(not int(own.any()))
            own.fill(0xFF)
            cupy.cuda.Device().synchronize()
            memory.close()
    return found


def test_memory_is_zeroed():
    assert run(reused) == [True] * 3


def test_closed_memory_is_free_again():
    assert run(leaking, True, "nccl") < 1 << 30, "4 GiB were allocated and closed"


def too_large(rank, num_ranks, all_gather):
    device = use_device(rank, True)
    with NcclGroup.connect(rank, num_ranks, all_gather, device) as group:
        with pytest.raises(RankError) as caught:
            group.allocate(1 << 45)
        (base,) = group.allocate(1 << 20).bases
    return str(caught.value), base > 0


def test_memory_that_is_too_large():
    text, goes_on = run(too_large)
    assert text.startswith(f"could not allocate {1 << 45:,} bytes: rank 0: NCCLError: ") and goes_on


def with_a_communicator(rank, num_ranks, all_gather):
    """A caller's communicator serves the group, then the caller, and may end before the group."""
    import cupy
    import nccl.core

    device = use_device(rank, True)
    communicator = nccl.core.Communicator.init(1, 0, nccl.core.get_unique_id())
    with NcclGroup(communicator) as group:
        memory = group.allocate(1 << 20)
        own = array(memory, memory.bases[0], 1 << 20, device)
        own.fill(7)
    x, y = cupy.arange(10, dtype=cupy.float32), cupy.zeros(10, cupy.float32)
    communicator.allreduce(x, y, nccl.core.SUM)
    cupy.cuda.Device().synchronize()
    late = NcclGroup(communicator)
    late.allocate(1 << 20)
    communicator.destroy()
    late.close()
    return group.device, communicator.is_valid, y.tolist()


def test_a_communicator_of_the_callers():
    assert run(with_a_communicator) == (0, False, list(range(10)))


def test_a_layer():
    cases = [((9,), True, "uniform"), ((300,), False, "zipf")]
    assert max(run(run_cases, True, "nccl", cases)) < 1e-2


def on_one_gpu(rank, num_ranks, all_gather):
    NcclGroup.connect(rank, num_ranks, all_gather, use_device(rank, True))


def test_two_ranks_on_one_gpu():
    for outcome in run_ranks(on_one_gpu, 2, timeout_s=TIMEOUT_S):
        assert outcome.error.startswith("RankMismatch: ranks 0 and 1 have the same GPU, and NCCL")
