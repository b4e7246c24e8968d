"""NcclGroup: one process for each rank; NCCL shares their memory, by NVLink and between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Self

from jitmoe.run import nccl_library
from jitmoe.run.meeting import Meeting
from jitmoe.run.nccl_allocation import NcclAllocation
from jitmoe.run.nccl_rail import NcclRail
from jitmoe.run.process_group import ProcessGroup
from jitmoe.run.ranks import RankMismatch, name_ranks
from jitmoe.run.shared_memory import SharingDevice
from jitmoe.run.symmetric import Rail, device_number

# What ranks must have alike beside what those of any group must, and the remedies.
_REMEDIES = {"nccl": "have all ranks load the same libnccl"}


class NcclGroup(ProcessGroup):
    """One rank of a group of processes with a GPU each, whose memory is in windows of NCCL: on one
    host, or on several that one NVLink domain joins. Making it is collective.

    Ranks of several NVLink domains (NCCL's LSA teams) are nodes of the group, `num_nodes`: as many
    ranks on each, one node's after the other's. Memory then has a `rail`, by NCCL's GIN.

    communicator  of nccl4py (nccl.core.Communicator), blocking; the caller destroys it, once the
                  group is closed
    all_gather    all_gather(obj) -> the objects of all ranks, by the communicator's ranks: any
                  collective of the caller's, for picklable objects. NCCL itself has none, and its
                  kernels would wait behind a layer that runs. One rank needs none
    device        the communicator's

    Needs nccl4py and NCCL 2.29.2 or later (windows and load/store peers: NCCL User Guide, "Window
    Registration" and "Device API - Host-Side Setup"); for several nodes NCCL 2.32, its wheel and
    nvJitLink ("Device API - GIN"): pip install 'jitmoe[nccl12]', or 'jitmoe[nccl13]' for CUDA 13.

    Raises on all ranks RankMismatch, by name of the ranks, for different versions of jitmoe or
    NCCL, or NVLink domains that are no nodes of a group, and RankError for whatever fails on one of
    them; TypeError for another communicator, ValueError for several ranks without all_gather.
    """

    rail = "gin"
    _by_hand = "NcclGroup.connect"

    def __init__(self, communicator, all_gather: Callable[[object], Sequence] | None = None):
        if not hasattr(communicator, "nranks"):
            raise TypeError(
                f"communicator must be of nccl4py, got {type(communicator).__name__}; for others "
                "take NcclGroup.from_torch(), .from_mpi() or .from_any()"
            )
        rank, num_ranks = communicator.rank, communicator.nranks
        if all_gather is None and num_ranks > 1:
            raise ValueError(
                f"a NcclGroup of {num_ranks} ranks needs all_gather, got None; pass one, or take "
                "NcclGroup.from_torch() or .from_mpi()"
            )
        super().__init__(Meeting(rank, num_ranks, all_gather or _of_one, "NcclGroup"))
        self.device = communicator.device.device_id
        self._communicator, self._owns_communicator = communicator, False

        def describe() -> dict[str, object]:
            facts = _describe(self.device)
            team = communicator.team_lsa
            return facts | {"domain": rank - team.rank * team.stride}

        facts = self._meeting.introduce(describe, _REMEDIES)
        self.num_nodes = _count_nodes(facts)
        self._device = SharingDevice(self.device)
        self._rail = self._connect_nodes() if self.num_nodes > 1 else None

    @classmethod
    def connect(
        cls,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[object], Sequence],
        device: int | None = None,
    ) -> Self:
        """Collective: of ranks that have no communicator yet, with one of the group's own, which
        `close` aborts. Arguments as a PeerGroup's; from_torch, from_mpi and from_any end here.

        Raises as the class, and RankMismatch for two ranks on one GPU.
        """
        meeting = Meeting(rank, num_ranks, all_gather, "NcclGroup")
        facts = meeting.introduce(partial(_describe, device), _REMEDIES)
        _refuse_shared_gpus(facts)  # NCCL would, without a name
        core = nccl_library.load()
        first = rank == 0
        unique = meeting.together(
            "make NCCL's unique id", lambda: bytes(core.get_unique_id()) if first else None
        )[0]
        communicator = core.Communicator()
        with ExitStack() as undo:
            undo.callback(communicator.abort)

            def initialize() -> None:
                with SharingDevice(facts[rank]["device"]).current():
                    communicator.initialize(num_ranks, rank, core.UniqueId.from_bytes(unique))

            meeting.together("connect the ranks by NCCL", initialize)
            group = cls(communicator, all_gather)
            undo.pop_all()
        group._owns_communicator = True
        return group

    _connect = connect

    def _connect_nodes(self) -> NcclRail:
        rail, together = NcclRail(self._device, self._communicator), self._meeting.together
        with ExitStack() as undo:
            undo.callback(rail.close)
            # Together first: NCCL would wait for a rank that cannot.
            together("reach other nodes by NCCL", rail.check)
            together("connect the nodes by NCCL", rail.create)
            undo.pop_all()
        return rail

    def close(self) -> None:
        """As `Group.close`; a communicator of the group's own is aborted, which waits for no other
        rank.
        """
        with ExitStack() as steps:  # all are taken even if one fails
            if self._owns_communicator:
                steps.callback(self._communicator.abort)
            if self._rail:
                steps.callback(self._rail.close)
            steps.callback(super().close)

    def _share(self, num_bytes: int) -> tuple:
        first = self.rank // self.ranks_per_node * self.ranks_per_node
        node = range(first, first + self.ranks_per_node)
        share = NcclAllocation(self._device, self._communicator, node)
        together = self._meeting.together
        with ExitStack() as undo:
            undo.callback(share.close)
            # Together first: NCCL's registration would wait for a rank that has no memory.
            together(f"allocate {num_bytes:,} bytes", partial(share.create, num_bytes))
            bases = together("register the memory with NCCL", share.register)[self.rank]
            undo.pop_all()
        rail = self._rail and Rail(self._rail.address, share.window, 0)
        return bases, share.close, rail


def _describe(device: int | None) -> dict[str, object]:
    """What the others must know of this rank."""
    version = nccl_library.version()
    device = device_number(device)
    return {"nccl": version, "device": device, "gpu": SharingDevice(device).uuid}


def _refuse_shared_gpus(facts: Sequence[dict]) -> None:
    gpus = [fact["gpu"] for fact in facts]
    for gpu in gpus:
        sharing = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(sharing) > 1:
            raise RankMismatch(
                f"{name_ranks(sharing)} have the same GPU, and NCCL takes one rank on each; give "
                "each rank a device of its own, or take a PeerGroup"
            )


def _count_nodes(facts: Sequence[dict]) -> int:
    """Of the ranks' NVLink domains. Raises RankMismatch unless they follow one another and have as
    many ranks each.
    """
    domains: dict[int, list[int]] = {}
    for fact in facts:
        domains.setdefault(fact["domain"], []).append(fact["rank"])
    nodes, size = list(domains.values()), len(domains[facts[0]["domain"]])
    if nodes != [list(range(first, first + size)) for first in range(0, len(facts), size)]:
        raise RankMismatch(
            f"NCCL finds {len(nodes)} NVLink domains: {'; '.join(map(name_ranks, nodes))}; a group "
            "takes as many ranks on each, numbered one domain after the other: number them so, or "
            "make a group of each"
        )
    return len(nodes)


def _of_one(obj) -> list:
    """The all_gather of one rank."""
    return [obj]
