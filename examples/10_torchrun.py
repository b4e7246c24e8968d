"""A layer on several GPUs of a host, a process for each, brought together by torch.distributed.

    torchrun --nproc-per-node=2 examples/10_torchrun.py

Needs the torch extra and as many Hopper GPUs as processes; without them it says so and stops. The
same by MPI: 11_mpi.py.
"""

import os
import sys
from importlib.util import find_spec

from jitmoe.run.driver import num_devices

if find_spec("torch") is None:
    print("no PyTorch here; pip install '.[cu13,torch]'")
    sys.exit()
if num_devices() == 0:
    print("no GPU here; this example needs two or more H100, H200 or H20 of one host")
    sys.exit()
if not 2 <= int(os.environ.get("WORLD_SIZE", 0)) <= num_devices():
    print(f"run it as torchrun --nproc-per-node=2 {sys.argv[0]}, on a GPU for each process")
    sys.exit()

import cupy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from jitmoe import ExpertWeights, GroupWorkspace, PeerGroup, mega_moe, reference  # noqa: E402
from jitmoe.measure import oracle_namespace  # noqa: E402

experts_each, hidden, intermediate, top_k, most = 8, 2048, 768, 4, 64
dist.init_process_group("gloo")  # of the host alone: the kernel moves tokens itself
rank, num_ranks = dist.get_rank(), dist.get_world_size()
device = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(device)
cupy.cuda.Device(device).use()

# All make all experts, for the oracle; a model would load a rank's share alone.
layer = reference.random_layer(num_ranks * experts_each, hidden, intermediate, seed=0, xp=cupy)
share = [part[rank * experts_each :][:experts_each] for part in layer]
w13, w13_scale, w2, w2_scale = map(torch.from_dlpack, share)
e4m3 = torch.float8_e4m3fn
weights = ExpertWeights(w13.view(e4m3), w2.view(e4m3), w13_scale, w2_scale)

num_tokens = most - 24 * rank % most  # ranks may differ, up to a bound that they agree on
tokens = reference.random_tokens(
    num_tokens, hidden, num_ranks * experts_each, top_k, seed=1 + rank, xp=cupy
)
x, topk_ids, topk_weights = map(torch.from_dlpack, tokens)

with PeerGroup.from_torch() as group:
    workspace = GroupWorkspace(group)
    y = mega_moe(
        x.bfloat16(),
        topk_ids,
        topk_weights,
        weights,
        group=group,
        max_num_tokens=most,
        workspace=workspace,
    )
    torch.cuda.synchronize()
    workspace.check()
    group.barrier()  # before memory goes that others may still read

xp = oracle_namespace()
ref = reference.mega_moe(tokens.x, None, *tokens[1:], *layer, requantize=True, xp=xp)
error = reference.relative_error(cupy.from_dlpack(y.float()), ref, xp)
print(f"rank {rank} of {num_ranks}: {num_tokens} tokens, relative error {error:.1e}")
assert error < 1e-2
dist.destroy_process_group()
