"""Calls of the layer on a GPU with random data: checked by the oracle and timed.

Time is that of a captured CUDA graph of several calls, each with tokens, routing and output of its
own, over several sets of weights in turn, so that weights come from memory and not from the L2
cache.
"""

from __future__ import annotations

import importlib
import statistics
import time
from functools import cache
from typing import NamedTuple

from jitmoe import reference
from jitmoe.fp8 import decode_bf16, encode_bf16, quantize_tokens
from jitmoe.fused import mega_moe
from jitmoe.plan.problem import MoeProblem
from jitmoe.run.workspace import Workspace
from jitmoe.weights import ExpertWeights

MAX_WEIGHT_SETS = 4
SPARE_BYTES = 6 << 30  # for x, y, the workspace and the oracle
COOL_S = 0.2  # pause before a replay of 512 tokens and more: continuous work lowers the clock
# Bounds of the relative error: the format's own noise, and rounding where the kernel rounds too.
EXACT_BOUND, REQUANTIZED_BOUND = 2.6e-2, 5e-3


class Call(NamedTuple):
    """Arguments of one call; `x` is what mega_moe takes, codes and scale what the oracle takes."""

    x: object
    codes: object
    scale: object
    topk_ids: object
    topk_weights: object

    def launch(self, weights: ExpertWeights, workspace: Workspace, out, stream=None):
        return mega_moe(
            self.x,
            self.topk_ids,
            self.topk_weights,
            weights,
            out=out,
            workspace=workspace,
            stream=stream,
        )


class Errors(NamedTuple):
    """Against the formula, against the oracle that re-quantises, and its worst element."""

    exact: float
    requantized: float
    worst: float

    @property
    def are_small(self) -> bool:
        return self.exact <= EXACT_BOUND and self.requantized <= REQUANTIZED_BOUND


class Times(NamedTuple):
    """Microseconds of a call: of graph replays, and of the host for an eager call."""

    median: float
    p10: float
    p90: float
    host: float


def weight_sets(layer: MoeProblem, outliers: int = 0):
    """As many sets of weights as fit, 4 at most, and the codes of the first for the oracle.

    The other sets have its experts moved.
    """
    import cupy

    sizes = (layer.num_experts, layer.hidden, layer.intermediate)
    first = reference.random_layer(*sizes, seed=1, xp=cupy, outliers=outliers)
    free_bytes = cupy.cuda.runtime.memGetInfo()[0] - SPARE_BYTES
    num_sets = 1 + free_bytes // (layer.num_experts * layer.expert_bytes)
    sets = [first] + [
        reference.Layer(*(cupy.roll(part, i, axis=0) for part in first))
        for i in range(1, max(1, min(MAX_WEIGHT_SETS, num_sets)))
    ]
    return [ExpertWeights(s.w13, s.w2, s.w13_scale, s.w2_scale) for s in sets], first


def random_call(layer: MoeProblem, seed: int, *, bf16: bool = False, outliers: int = 0) -> Call:
    """x ~ N(0, 1), top k of N(0, 1) scores, their softmax as router weights."""
    import cupy

    routing = "uniform" if layer.top_k <= layer.num_experts else "duplicates"
    sizes = (layer.num_tokens, layer.hidden, layer.num_experts, layer.top_k)
    tokens = reference.random_tokens(*sizes, seed, routing=routing, xp=cupy, outliers=outliers)
    codes, scale = quantize_tokens(tokens.x, cupy)
    x = encode_bf16(tokens.x, cupy) if bf16 else (codes, scale)
    return Call(x, codes, scale, tokens.topk_ids, tokens.topk_weights)


def poisoned(layer: MoeProblem):
    """An output full of NaN, as bf16 bits."""
    import cupy

    return cupy.full((layer.num_tokens, layer.hidden), 0xFFFF, cupy.uint16)


def check(layer: MoeProblem, call: Call, weights: ExpertWeights, codes: reference.Layer) -> Errors:
    """One call into a poisoned output, against both oracles."""
    import cupy

    workspace = Workspace(weights.device)
    y = call.launch(weights, workspace, poisoned(layer))
    cupy.cuda.get_current_stream().synchronize()
    workspace.check()
    return errors(y, call, codes)


def errors(y, call: Call, codes: reference.Layer) -> Errors:
    """Errors of `y` as the output of `call` with the weights `codes`."""
    xp = oracle_namespace()
    inputs = (call.codes, call.scale, call.topk_ids, call.topk_weights, *codes)
    exact = reference.relative_error(y, reference.mega_moe(*inputs, requantize=False, xp=xp), xp)
    ref = reference.mega_moe(*inputs, requantize=True, xp=xp)
    return Errors(exact, reference.relative_error(y, ref, xp), reference.worst_element(y, ref, xp))


def calls_per_graph(num_tokens: int) -> int:
    return 8 if num_tokens <= 128 else 4 if num_tokens <= 512 else 2


def measure(
    layer: MoeProblem, calls: list[Call], weights: list[ExpertWeights], replays=12
) -> Times:
    """Times of a call in a captured graph of all `calls`, and of the host for an eager one."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    workspace = Workspace(weights[0].device)
    outs = [poisoned(layer) for _ in calls]
    cupy.cuda.Device().synchronize()

    def run():
        for i, (call, out) in enumerate(zip(calls, outs, strict=True)):
            call.launch(weights[i % len(weights)], workspace, out, stream)

    with stream:
        run()
        stream.synchronize()
        host = []
        for _ in range(20):
            start = time.perf_counter()
            calls[0].launch(weights[0], workspace, outs[0], stream)
            host.append((time.perf_counter() - start) * 1e6)
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        for out in outs:
            out.fill(0xFFFF)
        times = []
        for _ in range(replays + 2):
            if layer.num_tokens >= 512:
                time.sleep(COOL_S)
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / len(calls))
    workspace.check()
    assert all(bool(cupy.isfinite(decode_bf16(out, cupy)).all()) for out in outs), "poison is left"
    deciles = statistics.quantiles(times[2:], n=10)
    return Times(statistics.median(times[2:]), deciles[0], deciles[-1], statistics.median(host))


def copy_gbps(num_bytes: int = 4 << 30) -> float:
    """Device-to-device copy in GB/s, bytes read and written, median of 5."""
    import cupy

    source, target = (cupy.empty(num_bytes, cupy.uint8) for _ in range(2))
    source.fill(1)
    times = []
    for _ in range(6):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        target[...] = source
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
    return 2 * num_bytes / statistics.median(times[1:]) * 1e-9


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
