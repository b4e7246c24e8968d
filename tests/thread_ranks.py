"""Ranks as threads of one process, and what all of them raised alike."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial


def run_threads(function, num_ranks: int) -> list:
    """function(rank, all_gather) in a thread for each rank: what it returned or raised."""
    barrier, parts = threading.Barrier(num_ranks, timeout=20), [b""] * num_ranks

    def all_gather(rank, obj):
        parts[rank] = pickle.dumps(obj)
        barrier.wait()
        objects = [pickle.loads(part) for part in parts]
        barrier.wait()
        return objects

    with ThreadPoolExecutor(num_ranks) as pool:
        runs = [pool.submit(function, rank, partial(all_gather, rank)) for rank in range(num_ranks)]
    return [run.exception() or run.result() for run in runs]


def refused(kind: type, answers: list) -> str:
    """The text that all ranks raised alike."""
    assert all(type(answer) is kind for answer in answers), answers
    assert len({str(answer) for answer in answers}) == 1, answers
    return str(answers[0])
