"""The demo on a Hopper GPU: a random layer of a model's size, checked by the oracle and timed."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from jitmoe import measure
from jitmoe.bench import methods
from jitmoe.bench.points import calls_per_graph
from jitmoe.bench.trial import Protocol, trial
from jitmoe.plan import heuristics
from jitmoe.plan.formats import format_of
from jitmoe.plan.models import ModelShape
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.driver import device_spec

TOKEN_COUNTS = (1, 8, 32, 128, 512, 2048)


def demo_on_gpu(
    console: Console,
    shape: ModelShape,
    ep: int,
    token_counts: list[int] | None,
    format: str = "fp8_block",
) -> bool:
    """Run, check and time one rank's layer, a line for each token count. True if all pass."""
    import cupy

    gpu = device_spec(cupy.cuda.Device().id)
    counts = token_counts or TOKEN_COUNTS
    layer = fit_experts(shape.problem(max(counts), ep, format), cupy.cuda.runtime.memGetInfo()[0])
    console.print(
        f"{shape.name}, one rank of {ep}, on {gpu.name}: {layer.num_experts} experts, "
        f"hidden {layer.hidden}, intermediate {layer.intermediate}, top_k {layer.top_k}, "
        f"{shape.activation.kind}, in {format}"
    )
    weights, first = measure.weight_sets(layer, outliers=4, variant=shape.variant)
    console.print(
        f"{len(weights)} sets of {weights[0].num_bytes / 1e9:.2f} GB of random weights in turn; "
        f"graph replay, median. Errors are against a float64 oracle: exact (bound "
        f"{measure.EXACT_BOUNDS[format]:g}) and rounding as the kernel does (bound "
        f"{measure.REQUANTIZED_BOUND:g})."
    )
    console.print("tokens  bucket     x       us   GB/s  TFLOP/s  of floor   error exact / rounded")
    passes = []
    for num_tokens in counts:
        sized = replace(layer, num_tokens=num_tokens)
        for kind in ("fp8", "bf16") if format_of(format).quantizes else ("bf16",):
            passes.append(_measure(console, sized, shape.variant, gpu, kind, weights, first))
    from jitmoe.demo import verdict

    console.print(verdict(all(passes)))
    return all(passes)


def fit_experts(layer: MoeProblem, free_bytes: int) -> MoeProblem:
    """The layer with its experts halved until two weight sets fit into `free_bytes`."""
    while (
        2 * layer.num_experts * layer.expert_bytes + measure.SPARE_BYTES > free_bytes
        and layer.num_experts > 1
    ):
        layer = replace(layer, num_experts=layer.num_experts // 2)
    return layer


def _measure(console, layer: MoeProblem, variant, gpu, kind, weights, first) -> bool:
    """Check one call, time several, print the line."""
    calls = [
        measure.random_call(layer, seed, bf16=kind == "bf16", outliers=4, variant=variant)
        for seed in range(calls_per_graph(layer.num_tokens))
    ]
    method = methods.of_jitmoe(layer, calls, weights)
    result = trial(
        method, methods.JITMOE[layer.format], measure.references(calls[0], first), Protocol()
    )
    errors = result.errors
    is_right = errors.are_small(layer.format)
    us = result.times["cool"].median if result.times else float("nan")
    floor = heuristics.floor(layer, gpu)
    gbps = floor.memory_us * gpu.read_gbps / us
    console.print(
        f"{layer.num_tokens:6}  {heuristics.bucket(layer):<8} {kind:>4} {us:8.1f} {gbps:6.0f} "
        f"{layer.flop / us * 1e-6:8.1f} {floor.us / us:8.0%}     "
        f"{errors.exact:.2e} / {errors.requantized:.2e} "
        f" {'PASS' if is_right else 'FAIL'}"
    )
    return is_right
