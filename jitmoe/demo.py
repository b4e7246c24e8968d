"""`jitmoe demo`: a real layer, run and checked on a Hopper GPU; where there is none, built, and the
kernels of a small layer run emulated.
"""

from __future__ import annotations

import math
import time
from importlib.util import find_spec

import numpy as np
from rich.console import Console

from jitmoe import prebuild, quantize, reference
from jitmoe.emulate.compile import NoHostCompiler
from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.fp8 import decode_e4m3, quantize_tokens
from jitmoe.plan import heuristics
from jitmoe.plan.formats import format_of
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.models import ModelShape
from jitmoe.plan.problem import QUANT_GROUP, MoeProblem
from jitmoe.plan.variant import Variant
from jitmoe.reference_biases import random_biases
from jitmoe.run.driver import device_spec, num_devices

ARCH = "sm_90a"
EMULATED_TOKENS = {"decode": 20, "prefill": 150}
EMULATED_BOUND = 5e-3  # bf16 slices and sums; the emulated tensor cores add exactly


def demo(
    console: Console,
    shape: ModelShape,
    ep: int,
    token_counts: list[int] | None,
    jobs: int,
    format: str = "fp8_block",
) -> bool:
    """Run the demo and print what it sees. True if everything that was checked is right.

    shape         the layer; its experts are shared by `ep` ranks and one rank is run
    token_counts  calls to run (default: a spread from decode to prefill)
    format        of weights and activations
    """
    if num_devices() > 0:
        try:
            gpu = device_spec(0)
        except ValueError as error:
            console.print(f"{error}", markup=False)
            gpu = None
        if gpu is not None and gpu.arch == ARCH:
            if find_spec("cupy") is None:
                console.print("CuPy is not installed: pip install 'jitmoe[cu12]'", markup=False)
                return False
            from jitmoe.demo_gpu import demo_on_gpu

            return demo_on_gpu(console, shape, ep, token_counts, format)
    return demo_without_gpu(console, shape, ep, jobs, format)


def demo_without_gpu(
    console: Console, shape: ModelShape, ep: int, jobs: int, format: str = "fp8_block"
) -> bool:
    """All that needs no GPU: kernels built, the oracle checked, small kernels emulated."""
    console.print(
        f"No Hopper GPU here. Building the {ARCH} kernels of {shape.name} (one rank of {ep}):",
        markup=False,
    )
    variant = shape.variant
    plans = prebuild.model_plans(shape, ep, ARCH, format, **variant.plan_fields)
    is_built = prebuild.prebuild(plans, jobs, console)
    start = time.perf_counter()
    error = oracle_error()
    is_right = error < 1e-12
    console.print(
        f"NumPy oracle against a loop over tokens, slots and channels: relative error {error:.1e} "
        f"in {time.perf_counter() - start:.1f} s: {verdict(is_right)}"
    )
    return is_built and is_right and demo_emulated(console, variant, format)


def demo_emulated(console: Console, variant: Variant, format: str = "fp8_block") -> bool:
    """The kernels of a small layer, run thread by thread on the CPU, against the oracle.

    True if they are right, or if there is no C++ compiler to run them with.
    """
    passes = []
    for bucket, plan in small_plans(variant, format).items():
        start, num_tokens = time.perf_counter(), EMULATED_TOKENS[bucket]
        try:
            error = emulated_error(plan, num_tokens, variant)
        except NoHostCompiler as missing:
            console.print(f"No kernel was executed: {missing}", markup=False)
            return True
        passes.append(error < EMULATED_BOUND)
        console.print(
            f"{bucket} kernel of a small layer, emulated, {num_tokens} tokens: relative error "
            f"{error:.1e} in {time.perf_counter() - start:.1f} s: {verdict(passes[-1])}"
        )
    console.print("That was this CPU; times need an H100, H200 or H20.")
    return all(passes)


def small_plans(variant: Variant, format: str) -> dict[str, MegaMoePlan]:
    """Of a small layer whose last tiles are ragged, by bucket."""
    intermediate = 224 if format_of(format).is_mx else 208
    small = MoeProblem(1, 256, intermediate, 4, 2, format, gated=variant.activation.gated)
    return heuristics.plans_of_model(small, gpu_spec("h200"), **variant.plan_fields)


def emulated_error(plan: MegaMoePlan, num_tokens: int, variant: Variant) -> float:
    """Relative error of an emulated launch against the oracle that rounds where the kernel does."""
    sizes, format = (plan.num_experts, plan.hidden, plan.intermediate), plan.format
    gated = variant.activation.gated
    layer = reference.random_layer(*sizes, seed=1, format=format, gated=gated)
    options, biases = variant.formula, None
    if variant.has_bias:
        biases = random_biases(*sizes, seed=3, gated=gated)
        options |= biases.arguments
    emulated = EmulatedLayer(plan, layer, max_tokens=num_tokens, num_blocks=3, biases=biases)
    shape = plan.hidden, plan.num_experts, plan.top_k
    tokens = reference.random_tokens(num_tokens, *shape, seed=2, routing="unused")
    x, x_scale = quantize.tokens(tokens.x, format)
    given = x if x_scale is None else (x, x_scale)
    y = emulated(given, tokens.topk_ids, tokens.topk_weights, variant)
    inputs = (x, x_scale, tokens.topk_ids, tokens.topk_weights, *layer)
    ref = reference.mega_moe(*inputs, requantize=True, format=format, **options)
    return reference.relative_error(y, ref)


def verdict(is_right: bool) -> str:
    return "PASS" if is_right else "FAIL"


def oracle_error() -> float:
    """Relative error of the oracle on a small layer with ragged scale blocks."""
    layer = reference.random_layer(num_experts=4, hidden=256, intermediate=80, seed=1)
    tokens = reference.random_tokens(6, 256, num_experts=4, top_k=2, seed=2, routing="unused")
    x, x_scale = quantize_tokens(tokens.x)
    args = (x, x_scale, tokens.topk_ids, tokens.topk_weights, *layer)
    return reference.relative_error(
        reference.mega_moe(*args, requantize=False), layer_by_loops(*args)
    )


def layer_by_loops(x, x_scale, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale) -> np.ndarray:
    """The layer's definition, a channel at a time in Python floats."""
    num_experts, hidden, intermediate = w2.shape
    y = np.zeros((len(x), hidden))
    for token, codes in enumerate(decode_e4m3(x)):
        row = [float(code) * _scale(x_scale[token], k) for k, code in enumerate(codes)]
        for slot, expert in enumerate(topk_ids[token]):
            if not 0 <= expert < num_experts:
                continue
            sums = [
                _dot(row, weights, w13_scale[expert][channel // QUANT_GROUP])
                for channel, weights in enumerate(decode_e4m3(w13[expert]))
            ]
            gates, ups = sums[:intermediate], sums[intermediate:]
            mid = [g / (1 + math.exp(-g)) * u for g, u in zip(gates, ups, strict=True)]
            for channel, weights in enumerate(decode_e4m3(w2[expert])):
                value = _dot(mid, weights, w2_scale[expert][channel // QUANT_GROUP])
                y[token, channel] += float(topk_weights[token, slot]) * value
    return y


def _scale(scales, k: int) -> float:
    return float(scales[k // QUANT_GROUP])


def _dot(row: list[float], codes: np.ndarray, scales: np.ndarray) -> float:
    terms = (
        x * float(code) * _scale(scales, k)
        for k, (x, code) in enumerate(zip(row, codes, strict=True))
    )
    return math.fsum(terms)
