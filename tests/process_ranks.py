"""Ranks as processes: a function run in n of them, with an all_gather that ends when one of them
does, and what became of each.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

_GRACE_S = 5.0  # for a process that has said all to end


@dataclass
class Outcome:
    """What became of one rank.

    value       what its function returned
    error       "Type: text" of the exception it raised, or how else it failed; None if it did not
    traceback   of that exception, as text
    exit_code   of the process; negative is the signal that ended it
    """

    value: object = None
    error: str | None = None
    traceback: str = ""
    exit_code: int | None = None


class RankGone(RuntimeError):
    """all_gather can't be completed: another rank has ended."""


def run_ranks(
    function: Callable, num_ranks: int, *arguments, timeout_s: float = 60.0
) -> list[Outcome]:
    """function(rank, num_ranks, all_gather, *arguments) in a new process for each rank (spawned:
    the function lies in a module, arguments and result are picklable). No process outlives the
    call; one that runs after `timeout_s` prints where each thread of it is, and is killed.
    """
    context = multiprocessing.get_context("spawn")
    outcomes = [Outcome() for _ in range(num_ranks)]
    say_at = time.monotonic() + 0.9 * timeout_s  # a clock of all processes; their start takes time
    processes, links = [], {}
    try:
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_run, args=(function, rank, num_ranks, there, arguments, say_at)
            )
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            processes.append(process)
            links[here] = rank
        _serve(links, outcomes, time.monotonic() + timeout_s)
        running = set(links.values())  # those that have not ended are still in it
        for rank, (process, outcome) in enumerate(zip(processes, outcomes, strict=True)):
            if rank not in running:
                process.join(_GRACE_S)
            if process.is_alive():
                outcome.error = outcome.error or f"still running after {timeout_s:g} s"
            elif outcome.error is None and process.exitcode:
                outcome.error = f"ended with exit code {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
        for process, outcome in zip(processes, outcomes, strict=False):
            process.join()
            outcome.exit_code = process.exitcode
        for link in links:
            link.close()
    return outcomes


def values(outcomes: Sequence[Outcome]) -> list:
    """What all ranks returned; fails with the tracebacks of those that did not."""
    failed = [
        f"rank {rank}: {outcome.error}\n{outcome.traceback}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def _serve(links: dict[Connection, int], outcomes: list[Outcome], deadline: float) -> None:
    """Gather for the processes until all have ended, whose links are removed, or time is up."""
    pending: dict[int, bytes] = {}
    ended: set[int] = set()
    while links and (remaining := deadline - time.monotonic()) > 0:
        for link in wait(list(links), remaining):
            rank = links[link]
            try:
                kind, *content = link.recv()
            except (EOFError, OSError):
                del links[link]
                link.close()
                ended.add(rank)
                pending.pop(rank, None)
                continue
            if kind == "gather":
                (pending[rank],) = content
            elif kind == "returned":
                outcomes[rank].value = pickle.loads(content[0])
            else:
                outcomes[rank].error, outcomes[rank].traceback = content
        if ended:
            answer = ("gone", sorted(ended))
        elif len(pending) == len(outcomes):
            answer = ("gathered", [pending[rank] for rank in range(len(outcomes))])
        else:
            continue
        for link, rank in links.items():
            if pending.pop(rank, None) is not None:
                _try_send(link, answer)


def _try_send(link: Connection, message) -> None:
    with suppress(OSError):  # it has just died: its end will be received
        link.send(message)


def _run(
    function: Callable,
    rank: int,
    num_ranks: int,
    link: Connection,
    arguments: tuple,
    say_at: float,
) -> None:
    """A process's main function."""
    faulthandler.dump_traceback_later(max(0.01, say_at - time.monotonic()))
    try:
        value = function(rank, num_ranks, partial(_all_gather, link), *arguments)
        message = ("returned", pickle.dumps(value))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        message = ("raised", f"{type(error).__name__}: {error}", text)
    link.send(message)


def _all_gather(link: Connection, obj) -> list:
    link.send(("gather", pickle.dumps(obj)))
    kind, content = link.recv()
    if kind == "gone":
        raise RankGone(f"ranks {content} have ended")
    return [pickle.loads(part) for part in content]
