"""Dispatch and combine on ranks that are processes: what each runs."""

from __future__ import annotations

import numpy as np
from group_kinds import make_group

from jitmoe import fp8, reference
from jitmoe.run.driver import num_devices

NUM_EXPERTS, HIDDEN, TOP_K = 32, 1024, 4


def run_transfers(rank, num_ranks, all_gather, share_gpu, kind, counts) -> float:
    """Dispatch and combine of one batch after the other, `counts` of each rank's tokens: the worst
    error beside a token times the sum of its router weights. Half of the batches do not wait.
    """
    import cupy

    from jitmoe import GroupWorkspace, combine, dispatch

    device = 0 if share_gpu else rank % num_devices()
    cupy.cuda.Device(device).use()
    worst = 0.0
    with make_group(kind, rank, num_ranks, all_gather, device) as group:
        workspace = GroupWorkspace(group)
        shared = {"group": group, "workspace": workspace}
        for number, of_ranks in enumerate(counts):
            tokens = reference.random_tokens(
                of_ranks[rank], HIDDEN, NUM_EXPERTS, TOP_K, number * num_ranks + rank
            )
            x = fp8.encode_bf16(tokens.x)
            found = dispatch(
                cupy.asarray(x),
                cupy.asarray(tokens.topk_ids),
                cupy.asarray(tokens.topk_weights),
                num_experts=NUM_EXPERTS,
                layout="experts",
                exact=number % 2 == 0,
                max_num_tokens=max(of_ranks),
                **shared,
            )
            y = combine(found.x, found.handle, **shared)
            wanted = fp8.decode_bf16(x) * tokens.topk_weights.sum(1, keepdims=True)
            got = fp8.decode_bf16(y.view(cupy.uint16).get())
            workspace.check()
            if got.size:
                worst = max(worst, float(np.abs(got - wanted).max()))
        group.barrier()
    return worst
