"""Times on several GPUs of a host, a process for each: the fused layer, dispatch and combine, and a
plain copy to a peer in the same run.

    torchrun --nproc-per-node=2 examples/15_many_gpus_speed.py --out rows.jsonl

A call is captured into a CUDA graph and replayed; all ranks replay as often, and a rank waits for
the others inside the kernels. A time is that of a replay on the slowest rank: the median of bursts.
Weights, tokens and routing are random. Needs the torch extra; without GPUs it says so and stops.
"""

import argparse
import json
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from jitmoe.run.driver import num_devices

if find_spec("torch") is None or num_devices() < 2:
    print("this example needs PyTorch and two or more H100, H200 or H20 of one host")
    sys.exit()
if not 2 <= int(os.environ.get("WORLD_SIZE", 0)) <= num_devices():
    print(f"run it as torchrun --nproc-per-node=2 {sys.argv[0]}, on a GPU for each process")
    sys.exit()

import cupy  # noqa: E402
import torch.distributed as dist  # noqa: E402

from jitmoe import GroupWorkspace, PeerGroup, combine, dispatch, measure, mega_moe  # noqa: E402
from jitmoe.bench.conditions import conditions  # noqa: E402
from jitmoe.bench.points import SHAPES  # noqa: E402
from jitmoe.fp8 import encode_bf16  # noqa: E402
from jitmoe.plan.variant import DEFAULT  # noqa: E402

BURSTS, REPLAYS = 7, 10


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="S1", choices=SHAPES, help="one rank's layer")
    parser.add_argument("--tokens", default="1,8,64,512,2048,8192", help="of each rank")
    parser.add_argument(
        "--sms", type=int, nargs="+", default=[12, 24, 64, 132], help="of each rank"
    )
    parser.add_argument("--out", type=Path, help="a .jsonl file to append rows to")
    return parser.parse_args()


class Clock:
    """Times of graphs that all ranks replay together."""

    def __init__(self):
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def time(self, call) -> dict:
        """Microseconds of one call, of the slowest rank in each burst."""
        call()
        call()
        self.stream.synchronize()
        self.stream.begin_capture()
        kept = call()  # a graph points to what a call returned
        graph = self.stream.end_capture()
        bursts = []
        for _ in range(BURSTS + 1):  # the first warms up
            dist.barrier()
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record(self.stream)
            for _ in range(REPLAYS):
                graph.launch(self.stream)
            last.record(self.stream)
            last.synchronize()
            bursts.append(cupy.cuda.get_elapsed_time(first, last) * 1e3 / REPLAYS)
        del kept
        slowest = [max(times) for times in zip(*gathered(bursts[1:]), strict=True)]
        return {"us_median": median(slowest), "us_min": min(slowest), "us_max": max(slowest)}


def gathered(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def copy_gbps(group, stream) -> float:
    """GB/s that each GPU sends while all do, by a copy to the next rank."""
    size = 1 << 30
    memory = group.allocate(size)
    own, peer = memory.bases[group.rank], memory.bases[(group.rank + 1) % group.num_ranks]
    times = []
    for _ in range(BURSTS):
        dist.barrier()
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(stream)
        cupy.cuda.runtime.memcpyAsync(peer + size // 2, own, size // 2, 3, stream.ptr)
        last.record(stream)
        last.synchronize()
        times.append(cupy.cuda.get_elapsed_time(first, last) * 1e3)
    return size / 2 / max(map(median, gathered(times))) / 1e3


def rows(arguments, group, clock):
    layer = SHAPES[arguments.shape]
    num_experts = group.num_ranks * layer.num_experts
    weights = measure.random_experts(layer, DEFAULT, group.rank, cupy).weights(layer.format)
    common = {
        "shape": arguments.shape,
        "num_ranks": group.num_ranks,
        "hidden": layer.hidden,
        "top_k": layer.top_k,
        "num_experts": num_experts,
        "copy_gbps": copy_gbps(group, clock.stream),
    }
    for num_tokens in map(int, arguments.tokens.split(",")):
        tokens = random_tokens(num_tokens, layer.hidden, num_experts, layer.top_k, group.rank)
        num_away = min(gathered(away(tokens[1], group.rank, layer.num_experts)))
        workspace = GroupWorkspace(group)
        shared = {"group": group, "workspace": workspace, "stream": clock.stream}
        bound = {"max_num_tokens": num_tokens, "num_experts": num_experts}
        shared["out"] = cupy.empty_like(tokens[0])
        call = partial(mega_moe, *tokens, weights, max_num_tokens=num_tokens, **shared)
        yield common | {"bench": "mega_moe", "num_tokens": num_tokens} | clock.time(call)
        out = shared.pop("out")
        for num_sms in arguments.sms:
            for kind, row_bytes in (("fp8", layer.hidden * 33 // 32), ("bf16", layer.hidden * 2)):
                send = partial(dispatch, *tokens, format=kind, num_sms=num_sms, **bound, **shared)
                row = common | {"num_tokens": num_tokens, "num_sms": num_sms, "format": kind}
                yield row | transfer("dispatch", clock.time(send), num_away * row_bytes)
            found = send()
            back = partial(combine, found.x, found.handle, out=out, num_sms=num_sms, **shared)
            yield row | transfer("combine", clock.time(back), num_away * row_bytes)
        workspace.check()
        workspace.close()
        cupy.get_default_memory_pool().free_all_blocks()


def transfer(name: str, times: dict, sent: int) -> dict:
    return {
        "bench": name,
        **times,
        "bytes_sent": sent,
        "sent_gbps": sent / times["us_median"] / 1e3,
    }


def random_tokens(num_tokens: int, hidden: int, num_experts: int, top_k: int, seed: int):
    rng = cupy.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, hidden), cupy.float32)
    ids = cupy.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    weights = rng.random((num_tokens, top_k), cupy.float32)
    return encode_bf16(x, cupy), ids.astype(cupy.int32), weights


def away(ids, rank: int, experts_each: int) -> int:
    """Rows that a rank's tokens send to others: one to each rank that has experts of theirs."""
    ranks = ids.get() // experts_each
    return sum(len({int(r) for r in of_token} - {rank}) for of_token in ranks)


def main() -> None:
    arguments = options()
    dist.init_process_group("gloo")
    cupy.cuda.Device(int(os.environ["LOCAL_RANK"])).use()
    where = conditions(
        cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "torchrun " + " ".join(sys.argv)
    )
    with PeerGroup.from_torch(device=int(os.environ["LOCAL_RANK"])) as group:
        for row in rows(arguments, group, Clock()):
            if group.rank != 0:
                continue
            shown = (f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print(*shown, sep="  ", flush=True)
            if arguments.out is not None:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row | where) + "\n")
        cupy.cuda.Device().synchronize()
        group.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
