"""The demo on a Hopper GPU: a random layer of a model's size, checked by the oracle and timed."""

from __future__ import annotations

import importlib
import statistics
import time
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from rich.console import Console

from jitmoe import reference
from jitmoe.fp8 import encode_bf16, quantize_tokens
from jitmoe.fused import mega_moe
from jitmoe.plan import heuristics
from jitmoe.plan.models import ModelShape
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.driver import device_spec
from jitmoe.run.workspace import Workspace
from jitmoe.weights import ExpertWeights

TOKEN_COUNTS = (1, 8, 32, 128, 512, 2048)
# Bounds of the relative error: the format's own noise, and rounding where the kernel rounds too.
EXACT_BOUND, REQUANTIZED_BOUND = 2.6e-2, 5e-3
MAX_WEIGHT_SETS = 4  # read in turn, so that weights come from memory and not from the L2 cache
SPARE_BYTES = 6 << 30  # for x, y, the workspace and the oracle
NUM_REPLAYS = 20


class Call(NamedTuple):
    """Arguments of one call; `x` is what mega_moe takes, codes and scale what the oracle takes."""

    x: object
    codes: object
    scale: object
    topk_ids: object
    topk_weights: object


def demo_on_gpu(
    console: Console, shape: ModelShape, ep: int, token_counts: list[int] | None
) -> bool:
    """Run, check and time one rank's layer, a line for each token count. True if all pass."""
    import cupy

    gpu = device_spec(cupy.cuda.Device().id)
    counts = token_counts or TOKEN_COUNTS
    layer = fit_experts(shape.problem(max(counts), ep), cupy.cuda.runtime.memGetInfo()[0])
    console.print(
        f"{shape.name}, one rank of {ep}, on {gpu.name}: {layer.num_experts} experts, "
        f"hidden {layer.hidden}, intermediate {layer.intermediate}, top_k {layer.top_k}"
    )
    weights, first = _weight_sets(layer, cupy)
    console.print(
        f"{len(weights)} sets of {weights[0].num_bytes / 1e9:.2f} GB of random weights in turn; "
        f"graph replay, median of {NUM_REPLAYS}. Errors are against a float64 oracle: exact (bound "
        f"{EXACT_BOUND:g}) and re-quantising as the kernel does (bound {REQUANTIZED_BOUND:g})."
    )
    console.print(
        "tokens  bucket     x       us   GB/s  TFLOP/s  of floor   error exact / re-quantised"
    )
    passes = []
    for num_tokens in counts:
        sized = replace(layer, num_tokens=num_tokens)
        for kind in ("fp8", "bf16"):
            passes.append(_measure(console, sized, gpu, kind, weights, first))
    from jitmoe.demo import verdict

    console.print(verdict(all(passes)))
    return all(passes)


def fit_experts(layer: MoeProblem, free_bytes: int) -> MoeProblem:
    """The layer with its experts halved until two weight sets fit into `free_bytes`."""
    while (
        2 * layer.num_experts * layer.expert_bytes + SPARE_BYTES > free_bytes
        and layer.num_experts > 1
    ):
        layer = replace(layer, num_experts=layer.num_experts // 2)
    return layer


def _weight_sets(layer: MoeProblem, cupy) -> tuple[list[ExpertWeights], reference.Layer]:
    """As many sets as fit, and the first for the oracle; the others have its experts moved."""
    first = reference.random_layer(
        layer.num_experts, layer.hidden, layer.intermediate, seed=1, xp=cupy, outliers=4
    )
    set_bytes = layer.num_experts * layer.expert_bytes
    free_bytes = cupy.cuda.runtime.memGetInfo()[0] - SPARE_BYTES
    num_sets = max(1, min(MAX_WEIGHT_SETS, 1 + free_bytes // set_bytes))
    sets = [first] + [
        reference.Layer(*(cupy.roll(part, i, axis=0) for part in first)) for i in range(1, num_sets)
    ]
    return [ExpertWeights(s.w13, s.w2, s.w13_scale, s.w2_scale) for s in sets], first


def _measure(console: Console, layer: MoeProblem, gpu, kind, weights, first) -> bool:
    """Check one call, time several, print the line."""
    import cupy

    workspace = Workspace()
    num_calls = 8 if layer.num_tokens <= 128 else 2
    calls = [_random_call(layer, kind, seed, cupy) for seed in range(num_calls)]
    y = _launch(calls[0], weights[0], workspace, _poisoned(layer, cupy))
    cupy.cuda.get_current_stream().synchronize()
    workspace.check()
    exact, requantized = (_error(y, calls[0], first, flag) for flag in (False, True))
    us = _graph_us(layer, calls, weights, workspace, cupy)
    is_right = exact <= EXACT_BOUND and requantized <= REQUANTIZED_BOUND
    floor = heuristics.floor(layer, gpu)
    gbps = floor.memory_us * gpu.read_gbps / us
    console.print(
        f"{layer.num_tokens:6}  {heuristics.bucket(layer):<8} {kind:>4} {us:8.1f} {gbps:6.0f} "
        f"{layer.flop / us * 1e-6:8.1f} {floor.us / us:8.0%}     {exact:.2e} / {requantized:.2e} "
        f" {'PASS' if is_right else 'FAIL'}"
    )
    return is_right


def _random_call(layer: MoeProblem, kind: str, seed: int, cupy) -> Call:
    routing = "uniform" if layer.top_k <= layer.num_experts else "duplicates"
    tokens = reference.random_tokens(
        layer.num_tokens,
        layer.hidden,
        layer.num_experts,
        layer.top_k,
        seed,
        routing=routing,
        xp=cupy,
        outliers=4,
    )
    codes, scale = quantize_tokens(tokens.x, cupy)
    x = (codes, scale) if kind == "fp8" else encode_bf16(tokens.x, cupy)
    return Call(x, codes, scale, tokens.topk_ids, tokens.topk_weights)


def _poisoned(layer: MoeProblem, cupy):
    """An output full of NaN, as bf16 bits."""
    return cupy.full((layer.num_tokens, layer.hidden), 0xFFFF, cupy.uint16)


def _launch(call: Call, weights: ExpertWeights, workspace: Workspace, out, stream=None):
    return mega_moe(
        call.x,
        call.topk_ids,
        call.topk_weights,
        weights,
        out=out,
        workspace=workspace,
        stream=stream,
    )


def _error(y, call: Call, first: reference.Layer, requantize: bool) -> float:
    xp = oracle_namespace()
    ref = reference.mega_moe(
        call.codes,
        call.scale,
        call.topk_ids,
        call.topk_weights,
        *first,
        requantize=requantize,
        xp=xp,
    )
    return reference.relative_error(y, ref, xp)


def _graph_us(layer, calls: list[Call], weights: list[ExpertWeights], workspace, cupy) -> float:
    """Median time of a call in a captured graph of all `calls`, in microseconds."""
    stream = cupy.cuda.Stream(non_blocking=True)
    outs = [_poisoned(layer, cupy) for _ in calls]
    cupy.cuda.Device().synchronize()

    def run():
        for i, (call, out) in enumerate(zip(calls, outs, strict=True)):
            _launch(call, weights[i % len(weights)], workspace, out, stream)

    with stream:
        run()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        times = []
        for _ in range(NUM_REPLAYS + 2):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / len(calls))
            if layer.num_tokens > 128:
                time.sleep(0.05)  # a cool card: continuous work lowers the clock
    workspace.check()
    return statistics.median(times[2:])


# C = A @ B in float64, B transposed or not by its strides. Slow, and enough for an oracle.
_MATMUL = r"""
typedef long long i64;

extern "C" __global__ void matmul(const double* a, const double* b, double* c, i64 m, i64 n, i64 k,
                                  i64 a_row, i64 a_col, i64 b_row, i64 b_col) {
    __shared__ double a_tile[16][17], b_tile[16][17];
    const int x = threadIdx.x, y = threadIdx.y;
    const i64 row = 16LL * blockIdx.y + y, col = 16LL * blockIdx.x + x;
    double sum = 0;
    for (i64 first = 0; first < k; first += 16) {
        a_tile[y][x] = row < m && first + x < k ? a[row * a_row + (first + x) * a_col] : 0;
        const i64 b_n = 16LL * blockIdx.x + y;  // of B's transpose, which has the dense rows
        b_tile[x][y] = b_n < n && first + x < k ? b[(first + x) * b_row + b_n * b_col] : 0;
        __syncthreads();
        for (int i = 0; i < 16; ++i) sum += a_tile[y][i] * b_tile[i][x];
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}
"""


class _WithoutBlas:
    """CuPy with a matrix product of its own."""

    def __getattr__(self, name):
        import cupy

        return getattr(cupy, name)

    def matmul(self, a, b):
        import cupy

        (m, k), n = a.shape, b.shape[1]
        c = cupy.empty((m, n), cupy.float64)
        steps = [step // 8 for array in (a, b) for step in array.strides]
        kernel = cupy.RawKernel(_MATMUL, "matmul")
        kernel((-(-n // 16), -(-m // 16)), (16, 16), (a, b, c, m, n, k, *steps))
        return c


@cache
def oracle_namespace():
    """CuPy, with a product of our own where cuBLAS is not installed: jitmoe does not need it."""
    import cupy

    try:
        importlib.import_module("cupy_backends.cuda.libs.cublas")
    except ImportError:
        return _WithoutBlas()
    return cupy
