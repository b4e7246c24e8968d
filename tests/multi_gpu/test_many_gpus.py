"""The kernel on ranks with a GPU each."""

import pytest
from group_kinds import skip_without
from process_ranks import run_ranks, values
from rank_layers import lose_a_rank, reset_after_a_late_rank, run_cases
from rank_transfers import run_transfers

from jitmoe.run.driver import num_devices

TIMEOUT_S = 120.0

CASES = [  # tokens of ranks, again and again
    ((9, 3), True, "uniform"),
    ((9, 3), False, "uniform"),
    ((1, 0), True, "uniform"),
    ((0, 130), True, "zipf"),
    ((300, 301), False, "unused"),
    ((2048, 2000), True, "uniform"),
    ((1000, 0), True, "one_expert"),
    ((500, 500), True, "duplicates"),
]


@pytest.mark.parametrize("kind", ["vmm", "ipc", "nccl"])
def test_against_the_oracle(kind):
    skip_without(kind)
    num_ranks = min(num_devices(), 8)
    cases = [((counts * num_ranks)[:num_ranks], *more) for counts, *more in CASES]
    for errors in values(run_ranks(run_cases, num_ranks, False, kind, cases, timeout_s=TIMEOUT_S)):
        assert max(errors) < 1e-2


@pytest.mark.skipif("num_devices() < 3", reason="survivors form a group: needs 3 GPUs")
@pytest.mark.parametrize("when", ["between", "during"])
@pytest.mark.parametrize("kind", [None, "nccl"])
def test_survivors_name_the_rank_that_is_gone(kind, when, tmp_path):
    skip_without(kind)
    arguments = False, kind, when, str(tmp_path)
    outcomes = run_ranks(lose_a_rank, 3, *arguments, timeout_s=TIMEOUT_S)
    assert outcomes[2].exit_code == -9
    for said in values(outcomes[:2]):
        assert "which rank 2 owes" in said or "of rank 2" in said


@pytest.mark.parametrize("kind", [None, "nccl"])
def test_reset_after_a_late_rank(kind):
    skip_without(kind)
    outcomes = values(run_ranks(reset_after_a_late_rank, 2, False, kind, timeout_s=TIMEOUT_S))
    assert "of rank 0" in outcomes[1][0]
    assert all(error < 1e-2 for _, error in outcomes)


@pytest.mark.parametrize("kind", ["vmm", "ipc", "nccl"])
def test_dispatch_and_combine(kind):
    skip_without(kind)
    num_ranks = min(num_devices(), 8)
    counts = [((9, 3) * 4)[:num_ranks], ((0, 700) * 4)[:num_ranks], (4096,) * num_ranks]
    arguments = False, kind, counts
    for error in values(run_ranks(run_transfers, num_ranks, *arguments, timeout_s=TIMEOUT_S)):
        assert error < 0.1
