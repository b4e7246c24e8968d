"""Symmetric memory of ranks with a GPU each."""

import re

import pytest
from group_kinds import skip_without
from process_ranks import run_ranks, values
from rank_memory import leaking, too_much, write_to_all

from jitmoe.run.driver import num_devices

TIMEOUT_S = 120.0
KINDS = ["vmm", "ipc", "nccl"]


@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_memory(kind):
    skip_without(kind)
    num_ranks = min(num_devices(), 8)
    num_bytes = num_ranks * ((3 << 20) + 5)  # no multiple of any granularity
    wanted = [[[16 * (r + 1) + peer] for r in range(num_ranks)] for peer in range(num_ranks)]
    arguments = False, kind, num_bytes
    results = values(run_ranks(write_to_all, num_ranks, *arguments, timeout_s=TIMEOUT_S))
    assert results == [(kind, [0] * num_ranks, wanted)] * num_ranks


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_too_large(kind):
    skip_without(kind)
    (text, is_zero), other = values(run_ranks(too_much, 2, False, kind, timeout_s=TIMEOUT_S))
    assert other == (text, is_zero) and is_zero == [True, True]
    assert re.match(
        f"could not allocate {1 << 45:,} bytes: (ranks 0 and 1: |rank 0: .*rank 1: )", text
    )


@pytest.mark.parametrize("kind", KINDS)
def test_closed_memory_is_free_again(kind):
    skip_without(kind)
    lost = values(run_ranks(leaking, 2, False, kind, timeout_s=TIMEOUT_S))
    assert max(lost) < 1 << 30, "4 GiB were allocated on each of two ranks and closed"
