"""A layer on several GPUs of a host, a process for each, brought together by MPI.

    mpirun -n 2 python examples/11_mpi.py

Needs mpi4py and as many Hopper GPUs as processes; without them it says so and stops. The same by
torch.distributed: 10_torchrun.py.
"""

import sys
from importlib.util import find_spec

from jitmoe.run.driver import num_devices

if num_devices() == 0:
    print("no GPU here; this example needs two or more H100, H200 or H20 of one host")
    sys.exit()
if find_spec("mpi4py") is None:
    print("no mpi4py here; pip install mpi4py")
    sys.exit()

import cupy  # noqa: E402
from mpi4py import MPI  # noqa: E402

from jitmoe import ExpertWeights, GroupWorkspace, PeerGroup, mega_moe, reference  # noqa: E402
from jitmoe.fp8 import encode_bf16  # noqa: E402
from jitmoe.measure import oracle_namespace  # noqa: E402

experts_each, hidden, intermediate, top_k, most = 8, 2048, 768, 4, 64
rank, num_ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
if not 2 <= num_ranks <= num_devices():
    print(f"run it as mpirun -n 2 python {sys.argv[0]}, on a GPU for each process")
    sys.exit()
cupy.cuda.Device(rank).use()

# All make all experts, for the oracle; a model would load a rank's share alone.
layer = reference.random_layer(num_ranks * experts_each, hidden, intermediate, seed=0, xp=cupy)
w13, w13_scale, w2, w2_scale = (part[rank * experts_each :][:experts_each] for part in layer)
weights = ExpertWeights(w13, w2, w13_scale, w2_scale)

num_tokens = most - 24 * rank % most  # ranks may differ, up to a bound that they agree on
tokens = reference.random_tokens(
    num_tokens, hidden, num_ranks * experts_each, top_k, seed=1 + rank, xp=cupy
)
with PeerGroup.from_mpi() as group:
    workspace = GroupWorkspace(group)
    y = mega_moe(
        encode_bf16(tokens.x, cupy),
        tokens.topk_ids,
        tokens.topk_weights,
        weights,
        group=group,
        max_num_tokens=most,
        workspace=workspace,
    )
    cupy.cuda.Device().synchronize()
    workspace.check()
    group.barrier()  # before memory goes that others may still read

xp = oracle_namespace()
ref = reference.mega_moe(tokens.x, None, *tokens[1:], *layer, requantize=True, xp=xp)
error = reference.relative_error(y.view(cupy.uint16), ref, xp)
print(f"rank {rank} of {num_ranks}: {num_tokens} tokens, relative error {error:.1e}")
assert error < 1e-2
