"""A layer on ranks that are processes: functions for process_ranks.run_ranks, which return what the
tests judge. With `one_gpu` all share GPU 0, else rank r has GPU r; for `kind` see
group_kinds.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from directory_gather import DirectoryGather
from group_kinds import make_group

from jitmoe import DeviceTimeout, ExpertWeights, GroupWorkspace, mega_moe, reference
from jitmoe.fp8 import encode_bf16, quantize_tokens

HIDDEN, INTERMEDIATE, TOP_K, EXPERTS_EACH = 1024, 512, 4, 4


class RankLayer:
    """This rank's share of a random layer, and random tokens of this rank."""

    def __init__(self, rank: int, num_ranks: int, one_gpu: bool):
        import cupy

        self.rank, self.num_experts = rank, num_ranks * EXPERTS_EACH
        self.device = 0 if one_gpu else rank
        cupy.cuda.Device(self.device).use()
        sizes = self.num_experts, HIDDEN, INTERMEDIATE
        self.layer = reference.random_layer(*sizes, 3, xp=cupy)
        first, last = rank * EXPERTS_EACH, (rank + 1) * EXPERTS_EACH
        layer = self.layer
        parts = layer.w13, layer.w2, layer.w13_scale, layer.w2_scale
        self.weights = ExpertWeights(*(part[first:last] for part in parts))

    def tokens(self, num_tokens: int, seed: int = 0, routing: str = "uniform"):
        import cupy

        sizes = HIDDEN, self.num_experts, TOP_K
        return reference.random_tokens(num_tokens, *sizes, seed + 97 * self.rank, routing, cupy)

    def run(self, tokens, group, workspace, bound: int, **options):
        """y of one call, synchronised and checked."""
        import cupy

        x = encode_bf16(tokens.x, cupy)
        options = {"group": group, "workspace": workspace, "max_num_tokens": bound} | options
        y = mega_moe(x, tokens.topk_ids, tokens.topk_weights, self.weights, **options)
        cupy.cuda.Device().synchronize()
        workspace.check()
        return y

    def error(self, y, tokens) -> float:
        import cupy

        if len(tokens.x) == 0:
            return 0.0
        x = quantize_tokens(tokens.x, cupy)
        routing = tokens.topk_ids, tokens.topk_weights
        ref = reference.mega_moe(*x, *routing, *self.layer, requantize=True, xp=cupy)
        return float(reference.relative_error(y, ref, cupy))


def run_cases(rank, num_ranks, all_gather, one_gpu, kind, cases) -> list[float]:
    """Errors of calls, (tokens of each rank, presum, routing)."""
    layer = RankLayer(rank, num_ranks, one_gpu)
    with make_group(kind, rank, num_ranks, all_gather, layer.device) as group:
        workspace, errors = GroupWorkspace(group, timeout_s=60), []
        for number, (counts, presum, routing) in enumerate(cases):
            tokens = layer.tokens(counts[rank], number, routing)
            y = layer.run(tokens, group, workspace, max(counts), presum=presum)
            errors.append(layer.error(y, tokens))
        group.barrier()
    return errors


def lose_a_rank(rank, num_ranks, all_gather, one_gpu, kind, when, directory) -> str:
    """The last rank is killed between launches or during one. The others run into the budget,
    then form a group of their own and run there; the text of their DeviceTimeout.
    """
    layer = RankLayer(rank, num_ranks, one_gpu)
    group = make_group(kind, rank, num_ranks, all_gather, layer.device)
    workspace = GroupWorkspace(group, timeout_s=4)
    tokens = layer.tokens(40)
    layer.run(tokens, group, workspace, 40)  # all ranks, so that kernels are loaded
    last = num_ranks - 1
    group.barrier()
    if rank == last:
        if when == "during":  # the others come late: it is killed while it waits for them
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            layer.run(tokens, group, workspace, 40)
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "during":
        time.sleep(2.5)
    try:
        layer.run(tokens, group, workspace, 40)
        raise AssertionError("a launch without the killed rank came to its end")
    except DeviceTimeout as error:
        said = str(error)
    survivors = RankLayer(rank, last, one_gpu)
    gather = DirectoryGather(Path(directory), rank, last)
    with make_group(kind, rank, last, gather, layer.device) as smaller:
        again = GroupWorkspace(smaller, timeout_s=60)
        tokens = survivors.tokens(40)
        assert survivors.error(survivors.run(tokens, smaller, again, 40), tokens) < 1e-2
        smaller.barrier()
    return said


def reset_after_a_late_rank(rank, num_ranks, all_gather, one_gpu, kind) -> tuple[str, float]:
    """Rank 0 comes after the others' budget is spent; all reset and run."""
    layer = RankLayer(rank, num_ranks, one_gpu)
    with make_group(kind, rank, num_ranks, all_gather, layer.device) as group:
        workspace = GroupWorkspace(group, timeout_s=3)
        tokens = layer.tokens(40)
        layer.run(tokens, group, workspace, 40)
        group.barrier()
        said = ""
        try:
            if rank > 0:
                layer.run(tokens, group, workspace, 40)
        except DeviceTimeout as error:
            said = str(error)
        workspace.reset()
        errors = [layer.error(layer.run(tokens, group, workspace, 40), tokens) for _ in range(3)]
        group.barrier()
    return said, max(errors)
