"""Times of dispatch and combine between virtual ranks, beside a plain copy on the same GPU.

    python examples/14_dispatch_speed.py [--tokens 4096] [--nodes 2] [--sms 4 8 16] [--out a.jsonl]

All ranks are on one GPU (LocalGroup), so that bytes go through its memory and not over links. A
sample is a replay of one call as a CUDA graph; few tokens stay in the L2 cache from one to the
next. Bytes are those that must move: dispatch reads every token once and writes every row that
came; combine reads every row and every partial sum, and writes every partial sum and y. Without a
GPU it says so and stops.

With --nodes the ranks are on as many virtual nodes, and the rail between them is memory, too: no
network is timed. `bytes_read`, `bytes_written` and what follows from them stay those above, as of
ranks that all reach each other, so that rows compare by their time. `bytes_moved` is what the
kernels read and write together. A dispatch between nodes reads every token and writes it to a
message; reads and writes that once for each other node which the token goes to; and reads the row
once on each node and writes it to all places there. A combine reads every row and writes a sum of
each rank; reads those of a node and writes one; reads and writes that once more if it goes to
another node; then reads the nodes' sums and writes y. What is put so is `bytes_put`. Counted are
rows with their scales, and messages whole where they are put (jitmoe/bench/transfer_bytes.py).
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from jitmoe.bench.conditions import conditions
from jitmoe.run.driver import device_spec, num_devices

if num_devices() == 0:
    print("no GPU here; this example needs an H100, H200 or H20")
    sys.exit()

import cupy  # noqa: E402

from jitmoe import GroupWorkspace, LocalGroup, combine, dispatch, fp8, reference  # noqa: E402
from jitmoe.bench import transfer_bytes  # noqa: E402
from jitmoe.bench.times import Times, summary  # noqa: E402

KINDS = [(layout, format) for layout in ("tokens", "experts") for format in ("bf16", "fp8")]
REPLAYS = 20
COPY_BYTES = 1 << 30


def times(launch, stream) -> Times:
    """Microseconds of what `launch` enqueues, by events around each."""
    samples = []
    for _ in range(REPLAYS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
        samples.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3)
    return summary(samples)


def replayed(call, stream):
    """(times of one call, captured and replayed; what it returned)."""
    for _ in range(2):  # builds and reserves, and leaves memory that the capture may take
        call()
    stream.synchronize()
    stream.begin_capture()
    result = call()
    graph = stream.end_capture()
    for _ in range(2):
        graph.launch(stream)
    return times(lambda: graph.launch(stream), stream), result


def copy_gbps(stream) -> float:
    """Bytes read and written by a copy on the device, a second."""
    source = cupy.random.default_rng(0).random(COPY_BYTES // 4, dtype=cupy.float32)
    target = cupy.empty_like(source)
    cupy.cuda.Device().synchronize()

    def copy():
        target.data.copy_from_device_async(source.data, COPY_BYTES, stream)

    for _ in range(2):
        copy()
    return 2 * COPY_BYTES / times(copy, stream).median / 1e3


def measured(tokens, options, layout, format, num_sms, shared):
    """(kernel, times, Bytes that must move, Bytes that the kernel moves) of a dispatch and of the
    combine behind it.
    """
    x, ids, weights = tokens
    stream = shared["stream"]
    how = {"num_experts": options.experts, "layout": layout, "format": format, "num_sms": num_sms}
    spent, here = replayed(lambda: dispatch(x, ids, weights, **how, **shared), stream)
    plan = here[0].handle.plan
    traffic = transfer_bytes.count(plan, ids, xp=cupy)
    assert traffic.sums == sum(int(of.num_received.get()[0]) for of in here)
    plain = transfer_bytes.plain_dispatch(plan, traffic)
    yield "dispatch", spent, plain, transfer_bytes.dispatch(plan, traffic)

    came = (of.x[0] if format == "fp8" else of.x for of in here)
    y = [own[cupy.arange(len(of)) % len(own)] for own, of in zip(x, came, strict=True)]
    out = [cupy.empty_like(own) for own in x]
    handles = [of.handle for of in here]
    cupy.cuda.Device().synchronize()
    spent, _ = replayed(lambda: combine(y, handles, out=out, num_sms=num_sms, **shared), stream)
    plain = transfer_bytes.plain_combine(plan, traffic)
    yield "combine", spent, plain, transfer_bytes.combine(plan, traffic)


def measurements(options, gpu):
    """A row for each kernel, layout, format and number of SMs."""
    stream = cupy.cuda.Stream(non_blocking=True)
    copy = copy_gbps(stream)
    print(f"{gpu.name}: a copy moves {copy:,.0f} GB/s")
    cupy.get_default_memory_pool().free_all_blocks()
    shape = options.tokens, options.hidden, options.experts, options.top_k
    of_ranks = [reference.random_tokens(*shape, seed, xp=cupy) for seed in range(options.ranks)]
    x, ids, weights = (list(part) for part in zip(*of_ranks, strict=True))
    tokens = [fp8.encode_bf16(own, cupy) for own in x], ids, weights
    del x, of_ranks
    cupy.cuda.Device().synchronize()
    with LocalGroup(options.ranks, nodes=options.nodes) as group:
        for layout, format in KINDS:
            workspace = GroupWorkspace(group)
            shared = {"group": group, "workspace": workspace, "stream": stream}
            for num_sms in options.sms or [gpu.num_sms // options.ranks]:
                for kernel, spent, plain, kernel_bytes in measured(
                    tokens, options, layout, format, num_sms, shared
                ):
                    gbps = plain.moved / spent.median / 1e3
                    yield {
                        "kernel": kernel,
                        "layout": layout,
                        "format": format,
                        "num_ranks": options.ranks,
                        "num_nodes": options.nodes,
                        "rail": group.rail if options.nodes > 1 else None,
                        "num_tokens": options.tokens,
                        "hidden": options.hidden,
                        "top_k": options.top_k,
                        "num_experts": options.experts,
                        "num_sms": num_sms,
                        "us_median": round(spent.median, 2),
                        "us_p10": round(spent.p10, 2),
                        "us_p90": round(spent.p90, 2),
                        "bytes_read": plain.read,
                        "bytes_written": plain.written,
                        "bytes_moved": kernel_bytes.moved,
                        "bytes_put": kernel_bytes.put,
                        "gbps": round(gbps),
                        "of_copy": round(gbps / copy, 3),
                        "written_gbps_per_sm": round(
                            plain.written / spent.median / 1e3 / (num_sms * options.ranks), 2
                        ),
                        "copy_gbps": round(copy),
                    }
            stream.synchronize()
            workspace.check()
            workspace.close()
            cupy.get_default_memory_pool().free_all_blocks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=1, help="of as many ranks each")
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256, help="of all ranks")
    parser.add_argument(
        "--sms", type=int, nargs="+", help="blocks of each rank, one after the other; default: all"
    )
    parser.add_argument("--out", type=Path, help="a .jsonl file to append rows to")
    options = parser.parse_args()
    gpu = device_spec(0)
    facts = conditions(gpu.name, shlex.join(["python", *sys.argv]))
    for row in measurements(options, gpu):
        print(
            f"{row['kernel']:<8}  {row['layout']:<7}  {row['format']:<4}  "
            f"{row['num_sms']:>3} SMs a rank  {row['us_median']:>9.1f} us  "
            f"({row['us_p10']:.1f} to {row['us_p90']:.1f})  {row['gbps']:>5,} GB/s, "
            f"{row['of_copy']:.2f} of a copy; an SM writes {row['written_gbps_per_sm']:.1f} GB/s",
            flush=True,
        )
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | facts) + "\n")


if __name__ == "__main__":
    main()
