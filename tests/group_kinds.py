"""Groups of processes by their kind: "nccl", or the handles of a PeerGroup: "vmm", "ipc", None."""

from __future__ import annotations

import pytest

from jitmoe import NcclGroup, PeerGroup
from jitmoe.run import nccl_library


def make_group(kind, rank, num_ranks, all_gather, device, **options):
    """Collective: a group of that kind; options are a PeerGroup's."""
    if kind == "nccl":
        return NcclGroup.connect(rank, num_ranks, all_gather, device)
    return PeerGroup(rank, num_ranks, all_gather, device, kind, **options)


def skip_without(kind) -> None:
    """Skip a test of a group whose library is missing or too old."""
    if kind == "nccl":
        try:
            nccl_library.load()
        except (ImportError, RuntimeError) as error:
            pytest.skip(str(error))
