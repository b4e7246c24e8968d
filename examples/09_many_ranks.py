"""A layer whose experts are shared out to ranks: tokens go to their experts and come back, all in
one launch.

    python examples/09_many_ranks.py

On a Hopper GPU four virtual ranks share it (LocalGroup). Without one, four ranks are emulated on
this CPU. Real ranks, a process and a GPU each: 10_torchrun.py and 11_mpi.py.
"""

import numpy as np

from jitmoe import fp8, reference
from jitmoe.run.driver import num_devices

RANKS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 8, 256, 128, 2  # experts of all ranks
COUNTS = [9, 3, 0, 24]  # tokens of each rank


def on_a_gpu(layer, tokens):
    import cupy

    from jitmoe import ExpertWeights, LocalGroup, mega_moe

    w13, w13_scale, w2, w2_scale = map(cupy.asarray, layer)
    parts = [cupy.split(part, RANKS) for part in (w13, w2, w13_scale, w2_scale)]
    weights = [ExpertWeights(*share) for share in zip(*parts, strict=True)]
    x = [cupy.asarray(fp8.encode_bf16(of.x)) for of in tokens]
    ids, router = ([cupy.asarray(of[i]) for of in tokens] for i in (1, 2))
    with LocalGroup(RANKS) as group:  # arguments are lists, an item a rank, and so is what comes
        y = mega_moe(x, ids, router, weights, group=group)
        return [cupy.asnumpy(of_rank.view(cupy.uint16)) for of_rank in y]


def emulated(layer, tokens):
    from jitmoe import MoeProblem
    from jitmoe.emulate.ranks import EmulatedRanks
    from jitmoe.plan.gpu import gpu_spec
    from jitmoe.plan.heuristics import choose

    of_rank = MoeProblem(max(COUNTS), HIDDEN, INTERMEDIATE, EXPERTS // RANKS, TOP_K)
    plan = choose(of_rank, gpu_spec("h200"), num_ranks=RANKS)
    shares = zip(*(np.split(part, RANKS) for part in layer), strict=True)
    ranks = EmulatedRanks(plan, [reference.Layer(*share) for share in shares], max(COUNTS))
    return ranks([(fp8.encode_bf16(of.x), of.topk_ids, of.topk_weights) for of in tokens])


layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=0)
tokens = [
    reference.random_tokens(count, HIDDEN, EXPERTS, TOP_K, seed=1 + rank)
    for rank, count in enumerate(COUNTS)
]
is_here = num_devices() > 0
print("on a GPU" if is_here else "no GPU here: emulated on this CPU")
y = (on_a_gpu if is_here else emulated)(layer, tokens)
for rank, (of_rank, of) in enumerate(zip(y, tokens, strict=True)):
    ref = reference.mega_moe(of.x, None, of.topk_ids, of.topk_weights, *layer, requantize=True)
    error = reference.relative_error(of_rank, ref)
    print(f"rank {rank} of {RANKS}: {len(of.x)} tokens, relative error {error:.1e}")
    assert error < 1e-2
