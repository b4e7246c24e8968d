"""The tests' own ranks: what is said of processes that raise, die or hang; none is left."""

import multiprocessing
import os
import signal
import time

import pytest
from process_ranks import RankGone, run_ranks, values


def gather_twice(rank, num_ranks, all_gather, factor):
    return [all_gather((rank, num_ranks)), all_gather(factor * rank)]


def test_all_gather_is_by_rank():
    assert values(run_ranks(gather_twice, 3, 10)) == [[[(0, 3), (1, 3), (2, 3)], [0, 10, 20]]] * 3


def ends_badly(rank, num_ranks, all_gather, how):
    if rank == 1:
        if how == "raise":
            raise KeyError("a text to be found")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(5)
        if how == "return":
            return "early"
        if how == "unpicklable":
            return lambda: None
        time.sleep(100)
    return all_gather(rank)


@pytest.mark.parametrize(
    "how, error, exit_code, traceback",
    [
        ("raise", "KeyError: 'a text to be found'", 0, "in ends_badly"),
        ("kill", "ended with exit code -9", -9, ""),
        ("exit", "ended with exit code 5", 5, ""),
        ("return", None, 0, ""),
        ("unpicklable", "AttributeError|PicklingError", 0, "pickle"),
    ],
)
def test_a_rank_that_ends_ends_the_all_gather_of_the_others(how, error, exit_code, traceback):
    first, second = run_ranks(ends_badly, 2, how)
    assert first.error == f"{RankGone.__name__}: ranks [1] have ended"
    assert "in ends_badly" in first.traceback
    assert second.exit_code == exit_code and traceback in second.traceback
    if error is None:
        assert second.error is None and second.value == "early"
    else:
        assert any(kind in second.error for kind in error.split("|"))
    with pytest.raises(AssertionError, match="rank 0: RankGone"):
        values([first, second])


def test_a_rank_that_hangs_is_killed(capfd):
    start = time.monotonic()
    first, second = run_ranks(ends_badly, 2, "hang", timeout_s=4)
    assert time.monotonic() - start < 30
    for outcome in (first, second):
        assert outcome.error == "still running after 4 s" and outcome.exit_code == -signal.SIGKILL
    assert not multiprocessing.active_children()
    assert "in ends_badly" in capfd.readouterr().err
