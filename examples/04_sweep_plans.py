"""Times other plans beside the one that the heuristics choose, and says how far the best is.

    python examples/04_sweep_plans.py --out sweep.jsonl [--shapes S1,S2] [--tokens 1,512]

Needs a Hopper GPU. Plans differ from the chosen one in one field, or are the other bucket's; points
and method are those of `jitmoe bench`, with fewer bursts.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cupy

from jitmoe import Workspace, measure, mega_moe
from jitmoe.bench import times
from jitmoe.bench.conditions import conditions
from jitmoe.bench.points import TOKENS, calls_per_graph, named_shapes, token_counts
from jitmoe.bench.trial import IDLE_TOKENS
from jitmoe.jit.build import build_many
from jitmoe.plan.heuristics import choose, plans_of_model
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.driver import device_spec

CHANGES = {
    "decode": (
        {"num_stages": 4},
        {"num_stages": 3},
        {"num_task_slots": 2},
        {"num_local_pairs": 512},
    ),
    "prefill": (
        {"num_stages": 3},
        {"num_task_slots": 2},
        {"unroll_k": 1},
        {"unroll_k": 2},
    ),
}
CLOSE = 1.05  # times the best
NUM_BURSTS = 4


def candidates(layer: MoeProblem, gpu) -> Iterator[tuple[dict, MegaMoePlan]]:
    """(what it changes, plan) of both buckets; plans that fit nowhere are left out."""
    for bucket, plan in plans_of_model(layer, gpu).items():
        for change in ({}, *CHANGES[bucket]):
            changed = replace(plan, **change)
            try:
                changed.check(gpu)
            except PlanError:
                continue
            if change == {} or changed != plan:
                yield {"bucket": bucket} | change, changed


def time_plan(plan, layer, calls, weights) -> times.Times:
    """Of one call, as `jitmoe bench` times it."""
    stream, workspace = cupy.cuda.Stream(non_blocking=True), Workspace(weights[0].device)
    ys = [measure.poisoned(layer) for _ in calls]
    cupy.cuda.Device().synchronize()

    def launch_all():
        for i, call in enumerate(calls):
            mega_moe(
                call.x,
                call.topk_ids,
                call.topk_weights,
                weights[i % len(weights)],
                out=ys[i],
                stream=stream,
                workspace=workspace,
                plan=plan,
            )

    launch_all()
    with stream:
        stream.begin_capture()
        launch_all()
        graph = stream.end_capture()
    idle_s = times.IDLE_S / 4 if layer.num_tokens >= IDLE_TOKENS else 0.0
    measured = times.measure(
        lambda: graph.launch(stream), stream, len(calls), "cool", NUM_BURSTS, idle_s
    )
    workspace.check()
    return measured


def sweep(name: str, layer: MoeProblem, tokens, gpu, built: set) -> Iterator[dict]:
    """A row for each token count and plan that was built."""
    weights, _ = measure.weight_sets(layer)
    plans = [(change, plan) for change, plan in candidates(layer, gpu) if plan in built]
    for num_tokens in tokens:
        sized = replace(layer, num_tokens=num_tokens)
        chosen = choose(sized, gpu)
        calls = [measure.random_call(sized, i) for i in range(calls_per_graph(num_tokens))]
        for change, plan in plans:
            measured = time_plan(plan, sized, calls, weights)
            yield {
                "bench": "sweep",
                "shape": name,
                "num_tokens": num_tokens,
                "plan": change,
                "is_chosen": plan == chosen,
                "us_median": round(measured.median, 2),
                "us_p10": round(measured.p10, 2),
                "us_p90": round(measured.p90, 2),
            }


def summarize(rows: list[dict]) -> None:
    """Print the chosen plan of each point beside the best."""
    points = {(row["shape"], row["num_tokens"]): [] for row in rows}
    for row in rows:
        points[row["shape"], row["num_tokens"]].append(row)
    num_close = 0
    for (shape, num_tokens), some in points.items():
        best = min(some, key=lambda row: row["us_median"])
        chosen = next((row for row in some if row["is_chosen"]), {"us_median": math.nan})
        ratio = chosen["us_median"] / best["us_median"]
        num_close += ratio <= CLOSE
        print(
            f"{shape} {num_tokens:5}: chosen {chosen['us_median']:8.1f} us, best "
            f"{best['us_median']:8.1f} us {best['plan']}, {100 * (ratio - 1):.1f} % apart"
        )
    print(f"{num_close} of {len(points)} chosen are within {100 * (CLOSE - 1):.0f} % of the best")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="S1,S2,S3,S4")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    layers, tokens = named_shapes(options.shapes), token_counts(options.tokens)
    gpu = device_spec(cupy.cuda.Device().id)
    plans = [plan for layer in layers.values() for _, plan in candidates(layer, gpu)]
    built = {outcome.plan for outcome in build_many(plans) if outcome.error is None}
    print(f"{len(built)} of {len(set(plans))} plans compile without a spill")
    rows = []
    for name, layer in layers.items():
        rows += sweep(name, layer, tokens, gpu, built)
        cupy.get_default_memory_pool().free_all_blocks()
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    where = conditions(name, "python " + " ".join(sys.argv))
    options.out.write_text("".join(json.dumps(row | where) + "\n" for row in rows))
    summarize(rows)


if __name__ == "__main__":
    main()
