"""Times compiler and disk cache on this machine and writes a record: one JSON line a kernel.

    python examples/03_build_times.py --out examples/records/build.jsonl [--shapes S1,S2]

Needs no GPU. Times on one are `jitmoe bench`'s.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from jitmoe.bench.conditions import conditions
from jitmoe.bench.points import SHAPES, named_shapes
from jitmoe.jit.build import build
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import plans_of_model

BUILD = """
import sys, time, pickle, cuda.core
from jitmoe.jit.build import build
plan = pickle.loads(bytes.fromhex(sys.argv[1]))
start = time.perf_counter()
print(build(plan).origin, time.perf_counter() - start)
"""


def build_fields(plan) -> dict:
    """Seconds to compile a plan's kernel, and for a new process to find it on disk."""
    command = [sys.executable, "-c", BUILD, pickle.dumps(plan).hex()]
    with tempfile.TemporaryDirectory() as folder:
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
        "us_median": round(float(compile_s) * 1e6),
        "compile_s": round(float(compile_s), 2),
        "load_s": round(float(load_s), 4),
        "num_regs": resources.num_regs,
        "spill_bytes": resources.spill_store_bytes,
        "smem_bytes": plan.smem.num_bytes,
        "num_stages": plan.num_stages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    command = "python " + " ".join(sys.argv)
    facts = conditions(f"{len(os.sched_getaffinity(0))} CPU cores, no GPU", command)
    common = {"bench": "build", "mode": "build", "format": "fp8_block", "num_ranks": 1}
    with arguments.out.open("a", encoding="utf-8") as file:
        for shape, layer in named_shapes(arguments.shapes).items():
            for plan in plans_of_model(layer, gpu_spec("h200")).values():
                num_tokens = 1 if plan.bucket == "decode" else 8192
                row = common | {"shape": shape} | asdict(layer) | {"num_tokens": num_tokens}
                row |= build_fields(plan)
                file.write(json.dumps(row | facts) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
