"""Dispatch and combine on ranks that are processes: what each runs."""

from __future__ import annotations

import os
import signal

import numpy as np
from group_kinds import make_group

from jitmoe import GroupWorkspace, combine, dispatch, fp8, reference
from jitmoe.run.driver import num_devices
from jitmoe.run.workspace import DeviceTimeout

NUM_EXPERTS, HIDDEN, TOP_K = 24, 1024, 4


def run_transfers(rank, num_ranks, all_gather, share_gpu, kind, counts, nodes=1) -> float:
    """Dispatch and combine of one batch after the other, `counts` of each rank's tokens: the worst
    error beside a token times the sum of its router weights. Half of the batches do not wait.
    """
    worst = 0.0
    with _group(rank, num_ranks, all_gather, share_gpu, kind, nodes) as group:
        workspace = GroupWorkspace(group)
        for number, of_ranks in enumerate(counts):
            tokens = _tokens(of_ranks[rank], number * num_ranks + rank)
            y = _there_and_back(tokens, workspace, max(of_ranks), exact=number % 2 == 0)
            wanted = tokens.x * tokens.topk_weights.sum(1, keepdims=True)
            if y.size:
                worst = max(worst, float(np.abs(y - wanted).max()))
        group.barrier()
    return worst


def lose_a_rank_of_transfers(rank, num_ranks, all_gather, share_gpu, kind, nodes, when) -> str:
    """The last rank is killed before a dispatch or before the combine behind it: the text of the
    others' DeviceTimeout.
    """
    group = _group(rank, num_ranks, all_gather, share_gpu, kind, nodes)
    workspace = GroupWorkspace(group, timeout_s=4)
    tokens = _tokens(40, rank)
    _there_and_back(tokens, workspace, 40, exact=False)  # all ranks, so that kernels are loaded
    found = _sent(tokens, workspace, 40, exact=True)
    group.barrier()
    if rank == num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if when == "combine":
            combine(found.x, found.handle, group=group, workspace=workspace).get()
            workspace.check()
        else:
            _there_and_back(tokens, workspace, 40, exact=True)
    except DeviceTimeout as error:
        return str(error)
    raise AssertionError("a launch without the killed rank came to its end")


def _group(rank, num_ranks, all_gather, share_gpu, kind, nodes):
    import cupy

    device = 0 if share_gpu else rank % num_devices()
    cupy.cuda.Device(device).use()
    options = {"nodes": nodes} if nodes > 1 else {}
    return make_group(kind, rank, num_ranks, all_gather, device, **options)


def _tokens(num_tokens, seed):
    return reference.random_tokens(num_tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed)


def _sent(tokens, workspace, bound, exact):
    import cupy

    given = fp8.encode_bf16(tokens.x), tokens.topk_ids, tokens.topk_weights
    return dispatch(
        *map(cupy.asarray, given),
        num_experts=NUM_EXPERTS,
        layout="experts",
        exact=exact,
        max_num_tokens=bound,
        group=workspace.group,
        workspace=workspace,
    )


def _there_and_back(tokens, workspace, bound, exact):
    """Rows that come back as they are, weighted, as f32."""
    import cupy

    found = _sent(tokens, workspace, bound, exact)
    y = combine(found.x, found.handle, group=workspace.group, workspace=workspace)
    got = fp8.decode_bf16(y.view(cupy.uint16).get())
    workspace.check()
    return got
