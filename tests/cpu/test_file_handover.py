"""Open files over Unix sockets: memory files arrive, and whoever fails to come is named."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from jitmoe.run import file_handover
from jitmoe.run.file_handover import FileHandover


def memory_file(text: str) -> int:
    file = os.memfd_create("text")
    os.write(file, text.encode())
    return file


def take(file: int) -> str:
    """The text of a file that was handed over; closes it."""
    assert not os.get_inheritable(file)
    text = os.pread(file, 100, 0).decode()
    os.close(file)
    return text


@pytest.fixture
def make():
    """make(num_ranks, timeout_s): all parts of one handover."""
    before, parts = len(os.listdir("/proc/self/fd")), []

    def make(num_ranks, timeout_s=20.0):
        parts.extend(FileHandover(rank, num_ranks, timeout_s) for rank in range(num_ranks))
        return parts

    yield make
    for part in parts:
        part.close()
    assert len(os.listdir("/proc/self/fd")) == before, "files were left open"


def exchange(parts, ranks=None) -> list:
    """What every rank got, as texts by rank, or the error it raised."""
    addresses = [part.address for part in parts]

    def run(rank):
        own = memory_file(f"from {rank}")
        try:
            files = parts[rank].exchange(own, addresses)
        except OSError as error:
            return error
        finally:
            os.close(own)
        return [None if file is None else take(file) for file in files]

    ranks = range(len(parts)) if ranks is None else ranks
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_everybody_gets_the_file_of_everybody(make, num_ranks):
    for rank, texts in enumerate(exchange(make(num_ranks))):
        assert texts == [None if r == rank else f"from {r}" for r in range(num_ranks)]


def test_strangers_are_sent_away(make):
    parts = make(2)
    strangers = []
    for said in (b"", b"hello", b"\x07\0\0\0", b"\0\0\0\0"):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(file_handover._name(parts[0].address))
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    assert exchange(parts) == [[None, "from 1"], ["from 0", None]]
    for stranger in strangers:
        with stranger, suppress(ConnectionResetError):
            assert socket.recv_fds(stranger, 4, 1)[:2] == (b"", [])


def test_other_users_are_refused(make, monkeypatch):
    monkeypatch.setattr(file_handover, "_user_of", lambda link: os.geteuid() + 1)
    for error in exchange(make(2)):
        assert isinstance(error, ConnectionError)
        assert "cannot reach the socket of rank" in str(error) and "another user's" in str(error)


def test_other_users_get_no_file(make, monkeypatch):
    """The one who serves looks, too: here all callers are of another user."""
    real = file_handover._user_of

    def user_of(link):
        return real(link) + (link.getsockname() != "")  # only accepted ones have a name

    monkeypatch.setattr(file_handover, "_user_of", user_of)
    for rank, error in enumerate(exchange(make(2, timeout_s=0.3))):
        assert isinstance(error, TimeoutError)
        assert str(error) == (
            f"rank {1 - rank} did not come for the file of rank {rank} within 0.3 s"
        )


def test_ranks_that_do_not_come_are_named(make):
    start = time.monotonic()
    (error,) = exchange(make(4, timeout_s=0.3), ranks=[2])
    assert isinstance(error, TimeoutError) and time.monotonic() - start < 5
    assert str(error) == ("ranks 0, 1 and 3 did not come for the file of rank 2 within 0.3 s")


def test_a_rank_that_knocks_and_does_not_serve_is_named(make):
    parts = make(2, timeout_s=0.3)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(file_handover._name(parts[0].address))
        link.sendall(file_handover._RANK.pack(1))
        (error,) = exchange(parts, ranks=[0])
        assert isinstance(error, TimeoutError)
        assert str(error) == "rank 1 did not hand its file to rank 0 within 0.3 s"


def test_a_rank_that_has_gone_is_named(make):
    parts = make(3)
    parts[1].close()
    (error,) = exchange(parts, ranks=[0])
    assert isinstance(error, ConnectionError)
    assert str(error).startswith("rank 0 cannot reach the socket of rank 1: ")
    assert "one network name space" in str(error)
