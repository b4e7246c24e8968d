"""The kernel on ranks that are processes and share one GPU by time slices: right results, and what
becomes of the others when a rank is lost.
"""

import pytest
from process_ranks import run_ranks, values
from rank_layers import lose_a_rank, reset_after_a_late_rank, run_cases
from rank_transfers import lose_a_rank_of_transfers, run_transfers

TIMEOUT_S = 170.0

CASES = {
    2: [
        ((9, 3), True, "uniform"),
        ((9, 3), False, "uniform"),
        ((0, 130), True, "zipf"),
        ((300, 300), True, "unused"),
    ],
    4: [((5, 0, 1, 7), True, "uniform"), ((200,) * 4, True, "uniform")],
}


@pytest.mark.parametrize("handles", ["vmm", "ipc"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_against_the_oracle(num_ranks, handles):
    arguments = True, handles, CASES[num_ranks]
    for errors in values(run_ranks(run_cases, num_ranks, *arguments, timeout_s=TIMEOUT_S)):
        assert max(errors) < 1e-2


@pytest.mark.parametrize("when", ["between", "during"])
def test_survivors_name_the_rank_that_is_gone(when, tmp_path):
    outcomes = run_ranks(lose_a_rank, 3, True, None, when, str(tmp_path), timeout_s=TIMEOUT_S)
    assert outcomes[2].exit_code == -9
    for said in values(outcomes[:2]):
        assert "which rank 2 owes" in said or "of rank 2" in said


def test_reset_after_a_late_rank():
    outcomes = values(run_ranks(reset_after_a_late_rank, 2, True, None, timeout_s=TIMEOUT_S))
    assert "of rank 0" in outcomes[1][0]
    assert all(error < 1e-2 for _, error in outcomes)


@pytest.mark.parametrize("num_ranks, nodes", [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_dispatch_and_combine(num_ranks, nodes):
    counts = [(5,) * num_ranks, (0, 70, 3, 1)[:num_ranks], (128,) * num_ranks]
    arguments = True, None, counts, nodes
    for error in values(run_ranks(run_transfers, num_ranks, *arguments, timeout_s=TIMEOUT_S)):
        assert error < 0.1


@pytest.mark.parametrize("num_ranks, nodes", [(3, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("when", ["dispatch", "combine"])
def test_survivors_of_transfers_name_the_rank_that_is_gone(when, num_ranks, nodes):
    """Of another node they may name a rank that waits for it there."""
    arguments = True, None, nodes, when
    outcomes = run_ranks(lose_a_rank_of_transfers, num_ranks, *arguments, timeout_s=TIMEOUT_S)
    assert outcomes[-1].exit_code == -9
    of_node = num_ranks // nodes
    for rank, said in enumerate(values(outcomes[:-1])):
        gone = num_ranks - 1
        is_mate = rank // of_node == gone // of_node
        named = [gone] if is_mate else range(gone // of_node * of_node, num_ranks)
        assert any(f"rank {r} " in said for r in named)
