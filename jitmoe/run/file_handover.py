"""Open files handed from every rank to every other, over Unix sockets of one user on one host.

Sockets have random names in Linux's abstract name space: nothing lies about on disk.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack

from jitmoe.run.ranks import name_ranks

_RANK = struct.Struct("<I")
_FILE = struct.Struct("i")
_PEER = struct.Struct("iII")  # struct ucred: process, user, group


class FileHandover:
    """One rank's part, listening from the start.

    address    what the other ranks must know of this one, a str
    timeout_s  seconds that `exchange` may take
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float):
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, timeout_s
        self.address = f"jitmoe-{secrets.token_hex(16)}"
        self._socket = _new_socket()
        try:
            self._socket.bind(_name(self.address))
            self._socket.listen()  # 128 may wait, more than there are ranks
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def exchange(self, file: int, addresses: Sequence[str]) -> list[int | None]:
        """Collective: hand `file` to all other ranks, whose `addresses` are by rank.

        Returns their files by rank, the caller's to close, and None at the own place. Raises
        TimeoutError or ConnectionError, naming the ranks.
        """
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        deadline = time.monotonic() + self._timeout_s
        with ExitStack() as opened, ExitStack() as received:
            # Connecting waits for nobody, since all listen: hence no rank waits in a circle.
            links = {rank: opened.enter_context(_new_socket()) for rank in others}
            for rank, link in links.items():
                self._knock(link, rank, addresses[rank], deadline)
            self._serve(file, set(others), deadline)
            files: list[int | None] = [None] * self._num_ranks
            for rank, link in links.items():
                files[rank] = self._receive(link, rank, deadline)
                received.callback(os.close, files[rank])
            received.pop_all()
            return files

    def _knock(self, link: socket.socket, rank: int, address: str, deadline: float) -> None:
        _limit(link, deadline)
        try:
            link.connect(_name(address))
            if _user_of(link) != os.geteuid():
                raise ConnectionError("it is another user's")
            link.sendall(_RANK.pack(self._rank))
        except OSError as error:
            raise ConnectionError(
                f"rank {self._rank} cannot reach the socket of rank {rank}: {error}; run all ranks "
                "as one user in one network name space (one container)"
            ) from error

    def _serve(self, file: int, awaited: set[int], deadline: float) -> None:
        while awaited:
            try:
                _limit(self._socket, deadline)
                link, _ = self._socket.accept()
            except TimeoutError as error:
                raise TimeoutError(
                    f"{name_ranks(awaited)} did not come for the file of rank {self._rank} "
                    f"within {self._timeout_s:g} s"
                ) from error
            with link:
                rank = _caller(link, deadline)
                if rank in awaited:  # strangers are sent away
                    awaited.remove(rank)
                    self._hand(link, rank, file)

    def _hand(self, link: socket.socket, rank: int, file: int) -> None:
        try:
            socket.send_fds(link, [_RANK.pack(self._rank)], [file])
        except OSError as error:
            raise ConnectionError(
                f"rank {rank} hung up before rank {self._rank} handed its file over: {error}"
            ) from error

    def _receive(self, link: socket.socket, rank: int, deadline: float) -> int:
        try:
            _limit(link, deadline)
            said, files = _receive_file(link)
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {rank} did not hand its file to rank {self._rank} within "
                f"{self._timeout_s:g} s"
            ) from error
        except OSError as error:
            raise ConnectionError(f"rank {rank} broke off before handing its file over") from error
        if said != _RANK.pack(rank) or len(files) != 1:
            for file in files:
                os.close(file)
            raise ConnectionError(f"rank {rank} ended the connection without handing its file over")
        return files[0]


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _name(address: str) -> bytes:
    return b"\0" + address.encode()


def _limit(link: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the time is up")
    link.settimeout(remaining)


def _receive_file(link: socket.socket) -> tuple[bytes, list[int]]:
    # socket.recv_fds drops its flags (Python 3.11): programs started meanwhile would inherit the
    # file.
    room = socket.CMSG_LEN(_FILE.size)
    said, ancillary, _, _ = link.recvmsg(_RANK.size, room, socket.MSG_CMSG_CLOEXEC)
    files = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files += [file for (file,) in _FILE.iter_unpack(data)]
    return said, files


def _user_of(link: socket.socket) -> int:
    """The user at the other end, by the kernel's word."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(credentials)[1]


def _caller(link: socket.socket, deadline: float) -> int | None:
    """The rank that connected; None for anybody else."""
    try:
        if _user_of(link) != os.geteuid():
            return None
        _limit(link, deadline)
        said = link.recv(_RANK.size)
    except OSError:
        return None
    return _RANK.unpack(said)[0] if len(said) == _RANK.size else None
