"""Measure the layer on this GPU and write a record: one JSON line a point, the fields of README.

    python examples/03_measure.py --out examples/records/h200.jsonl [--shapes S1,S2] [--tokens 1,8]
    python examples/03_measure.py --out examples/records/build.jsonl --build

Time is that of graph replays with weights from memory (jitmoe/measure.py). The rate of a copy in
device memory is measured in the same run. --build times compiler and disk cache instead; it needs
no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jitmoe import measure
from jitmoe.jit import nvrtc
from jitmoe.jit.build import build
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.driver import device_spec

SHAPES = {
    "S1": MoeProblem(0, 7168, 2048, 32, 8),  # DeepSeek-V3, one rank of EP8
    "S2": MoeProblem(0, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "S3": MoeProblem(0, 4096, 14336, 8, 2),  # Mixtral-8x7B
    "S4": MoeProblem(0, 4096, 2048, 32, 6),
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)


def conditions(gpu: str) -> dict:
    """GPU, driver, versions, clocks, date, command, commit."""
    packages = ("cuda-bindings", "cuda-core", "cupy-cuda12x", "cupy-cuda13x", "numpy")
    versions = {"nvrtc": nvrtc.version(), "python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = version(package)
        except ImportError:
            continue
    return {
        "gpu": gpu,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": versions,
        "clocks": output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python " + " ".join(sys.argv),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
    }


def output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def builds(layer: MoeProblem, gpu):
    """Compiling each kernel of `layer`."""
    for num_tokens in (1, 8192):
        fields = build_fields(heuristics.choose(replace(layer, num_tokens=num_tokens), gpu))
        yield {"num_tokens": num_tokens, "us_median": round(fields["compile_s"] * 1e6)} | fields


def build_fields(plan) -> dict:
    """Seconds to compile a plan's kernel, and for a new process to find it on disk."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import sys, time, pickle, cuda.core\n"
            "from jitmoe.jit.build import build\n"
            "plan = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
            "t = time.perf_counter(); built = build(plan)\n"
            "print(built.origin, time.perf_counter() - t)"
        )
        command = [sys.executable, "-c", code, pickle.dumps(plan).hex()]
        env = os.environ | {"JITMOE_CACHE_DIR": folder}
        lines = [
            subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]
    (first, compile_s), (second, load_s) = (line.split() for line in lines)
    assert (first, second) == ("compiled", "disk")
    resources = build(plan).cubin.resources
    return {
        "bucket": plan.bucket,
        "compile_s": round(float(compile_s), 2),
        "load_s": round(float(load_s), 4),
        "num_regs": resources.num_regs,
        "spill_bytes": resources.spill_store_bytes,
        "smem_bytes": plan.smem.num_bytes,
        "num_stages": plan.num_stages,
    }


def points(layer: MoeProblem, token_counts, gpu, oracle: bool):
    """Measured fields of every token count."""
    import cupy

    weights, codes = measure.weight_sets(layer)
    for num_tokens in token_counts:
        sized = replace(layer, num_tokens=num_tokens)
        calls = [
            measure.random_call(sized, seed) for seed in range(measure.calls_per_graph(num_tokens))
        ]
        row = {"num_tokens": num_tokens, "bucket": heuristics.bucket(sized)}
        if oracle:
            errors = measure.check(sized, calls[0], weights[0], codes)
            row |= {
                "rel_error": errors.exact,
                "rel_error_requantized": errors.requantized,
                "worst_element": errors.worst,
            }
        times = measure.measure(sized, calls, weights)
        floor = heuristics.floor(sized, gpu)
        yield row | {
            "us_median": round(times.median, 2),
            "us_p10": round(times.p10, 2),
            "us_p90": round(times.p90, 2),
            "host_us": round(times.host, 1),
            "floor_us": round(floor.us, 2),
            "tflops": round(sized.flop / times.median * 1e-6, 1),
            "num_weight_sets": len(weights),
        }
        cupy.get_default_memory_pool().free_all_blocks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-oracle", action="store_true")
    parser.add_argument("--build", action="store_true", help="time compiler and disk cache only")
    arguments = parser.parse_args()
    token_counts = [int(n) for n in arguments.tokens.split(",")]
    if arguments.build:
        gpu, common = GPUS["h200"], {"bench": "build", "mode": "build"}
        facts = conditions(f"{len(os.sched_getaffinity(0))} CPU cores, no GPU")
    else:
        import cupy

        gpu = device_spec(cupy.cuda.Device().id)
        common = {"bench": "mega_moe", "mode": "graph", "copy_gbps": round(measure.copy_gbps())}
        facts = conditions(gpu.name)
    print(facts, common, flush=True)
    with arguments.out.open("a") as file:
        for shape in arguments.shapes.split(","):
            layer = SHAPES[shape]
            sizes = {name: value for name, value in asdict(layer).items() if name != "num_tokens"}
            common |= {"format": "fp8_block", "shape": shape, "num_ranks": 1} | sizes
            rows = (
                builds(layer, gpu)
                if arguments.build
                else points(layer, token_counts, gpu, not arguments.no_oracle)
            )
            for row in rows:
                file.write(json.dumps(common | row | facts) + "\n")
                file.flush()
                print(shape, row, flush=True)


if __name__ == "__main__":
    main()
