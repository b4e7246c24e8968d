"""A layer in three steps: dispatch, experts of one's own, combine; beside mega_moe, which is all
three in one launch.

    python examples/13_dispatch_combine.py [--nodes 2]

On a Hopper GPU four virtual ranks share the experts (LocalGroup) and these run in CuPy. Without
one, the kernels of four ranks are emulated on this CPU and the experts run in NumPy.

With --nodes the ranks are on as many nodes: tokens and sums go between these along a rail, which is
memory on the GPU and a network card in the emulator. mega_moe has no nodes: it runs on as many
ranks of one.
"""

import argparse

import numpy as np

from jitmoe import fp8, reference
from jitmoe.run.driver import num_devices

RANKS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 8, 256, 128, 2  # experts of all ranks
COUNTS = [9, 3, 0, 24]  # tokens of each rank
ALIGNMENT = 8  # of experts' first rows, as a grouped GEMM may want it


def mlp(rows, starts, counts, w13, w2, xp=np):
    """What a rank's experts make of rows [rows, hidden], bf16 bits that lie expert by expert."""
    y = xp.zeros(rows.shape, xp.uint16)
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own = slice(int(start), int(start + count))
        x = fp8.decode_bf16(rows[own], xp)
        gate, up = xp.split(x @ fp8.decode_bf16(w13[expert], xp).T, 2, axis=1)
        mid = fp8.round_bf16(gate / (1 + xp.exp(-gate)) * up, xp)
        y[own] = fp8.encode_bf16(mid @ fp8.decode_bf16(w2[expert], xp).T, xp)
    return y


def on_a_gpu(nodes, w13, w2, calls):
    import cupy

    from jitmoe import ExpertWeights, LocalGroup, combine, dispatch, mega_moe

    w13, w2 = ([cupy.asarray(share) for share in shares] for shares in (w13, w2))
    # Arguments are lists, an item a rank, and so is what comes.
    x, ids, router = ([cupy.asarray(part) for part in parts] for parts in zip(*calls, strict=True))
    with LocalGroup(RANKS, nodes=nodes) as group, LocalGroup(RANKS) as one_node:
        here = dispatch(
            x,
            ids,
            router,
            group=group,
            num_experts=EXPERTS,
            layout="experts",
            alignment=ALIGNMENT,
            exact=True,  # arrays have as many rows as came
        )
        rows = []
        for of, *weights in zip(here, w13, w2, strict=True):
            starts, counts = of.expert_starts.get()[:-1], of.expert_counts.get()
            rows.append(mlp(of.x.view(cupy.uint16), starts, counts, *weights, cupy))
        apart = combine(rows, [of.handle for of in here], group=group)
        weights = [ExpertWeights(*share) for share in zip(w13, w2, strict=True)]
        whole = mega_moe(x, ids, router, weights, group=one_node)
        return [[cupy.asnumpy(y.view(cupy.uint16)) for y in ys] for ys in (apart, whole)]


def emulated(nodes, w13, w2, calls):
    from jitmoe import MoeProblem
    from jitmoe.emulate.ranks import EmulatedRanks
    from jitmoe.emulate.transfer import EmulatedTransfer
    from jitmoe.plan.gpu import gpu_spec
    from jitmoe.plan.heuristics import choose
    from jitmoe.plan.transfer_pairs import dispatch_plan

    gpu, local, most = gpu_spec("h200"), EXPERTS // RANKS, max(COUNTS)
    ways = {"expert_rows": True, "alignment": ALIGNMENT, "num_nodes": nodes, "rail": "gin"}
    transfer = EmulatedTransfer(dispatch_plan(gpu.arch, HIDDEN, local, TOP_K, RANKS, **ways), most)
    here = transfer.dispatch(calls)
    rows = []
    for rank, (of, *weights) in enumerate(zip(here, w13, w2, strict=True)):
        came = transfer.region(rank, "rows", np.uint16)[: of.num_received[1]]
        rows.append(mlp(came, of.expert_starts[:-1], of.expert_counts, *weights))
    apart = transfer.combine(rows, here)
    of_rank = MoeProblem(most, HIDDEN, INTERMEDIATE, local, TOP_K, "bf16")
    layers = [reference.Layer(a, None, b, None) for a, b in zip(w13, w2, strict=True)]
    return apart, EmulatedRanks(choose(of_rank, gpu, num_ranks=RANKS), layers, most)(calls)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--nodes", type=int, choices=(1, 2, 4), default=1, help=f"of {RANKS} ranks")
nodes = parser.parse_args().nodes
layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=0, format="bf16")
tokens = [
    reference.random_tokens(count, HIDDEN, EXPERTS, TOP_K, seed=1 + rank)
    for rank, count in enumerate(COUNTS)
]
calls = [(fp8.encode_bf16(of.x), of.topk_ids, of.topk_weights) for of in tokens]
is_here = num_devices() > 0
where = "on a GPU" if is_here else "no GPU here: emulated on this CPU"
print(where if nodes == 1 else f"{where}, {nodes} nodes")
shares = (np.split(part, RANKS) for part in (layer.w13, layer.w2))
results = (on_a_gpu if is_here else emulated)(nodes, *shares, calls)
for rank, (apart, whole) in enumerate(zip(*results, strict=True)):
    error = reference.relative_error(apart, whole)
    print(f"rank {rank} of {RANKS}: {len(apart)} tokens, relative error {error:.1e}")
    assert error < 1e-2
