"""Random weights and calls of the layer on a GPU, and errors of their results by the oracle."""

from __future__ import annotations

import importlib
from functools import cache
from typing import NamedTuple

from jitmoe import quantize, reference
from jitmoe.fp8 import encode_bf16
from jitmoe.fused import mega_moe
from jitmoe.plan.formats import FORMATS, format_of
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT, Variant
from jitmoe.reference_biases import Biases, random_biases
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.workspace import Workspace
from jitmoe.weights import ExpertWeights

MAX_WEIGHT_SETS = 4
SPARE_BYTES = 6 << 30  # for x, y, the workspace and the oracle
# Bounds of the relative error: the format's own noise, and rounding where the kernel rounds too.
EXACT_BOUNDS = {name: 2.6e-2 if one.quantizes else 5e-3 for name, one in FORMATS.items()}
REQUANTIZED_BOUND = 5e-3


class Call(NamedTuple):
    """Arguments of one call; `x` is what mega_moe takes, codes and scale what the oracle takes. In
    bf16, codes are the bits and scale is None.
    """

    x: object
    codes: object
    scale: object
    topk_ids: object
    topk_weights: object
    variant: Variant = DEFAULT
    format: str | None = None  # None: by dtypes

    def launch(self, weights: ExpertWeights, workspace: Workspace, out, stream=None, plan=None):
        return mega_moe(
            self.x,
            self.topk_ids,
            self.topk_weights,
            weights,
            activation=self.variant.activation,
            out=out,
            workspace=workspace,
            stream=stream,
            plan=plan,
        )

    def of_ranks(self, num_ranks: int) -> list[Call]:
        """Of ranks that have as many of its tokens each; views."""
        arrays = self.codes, self.scale, self.topk_ids, self.topk_weights
        in_pair = isinstance(self.x, tuple)
        x = zip(
            *(_cut(part, num_ranks) for part in (self.x if in_pair else (self.x,))), strict=True
        )
        rest = zip(*(_cut(array, num_ranks) for array in arrays), strict=True)
        return [
            Call(own_x if in_pair else own_x[0], *own, self.variant, self.format)
            for own_x, own in zip(x, rest, strict=True)
        ]


class Errors(NamedTuple):
    """Against the formula, against the oracle that re-quantises, and its worst element."""

    exact: float
    requantized: float
    worst: float

    def are_small(self, format: str) -> bool:
        """Whether they are what the number format of the weights allows."""
        return self.exact <= EXACT_BOUNDS[format] and self.requantized <= REQUANTIZED_BOUND


class References(NamedTuple):
    """What a call should give, float64 [num_tokens, hidden]: by the formula, and by the oracle that
    re-quantises between the GEMMs.
    """

    exact: object
    requantized: object


class Experts(NamedTuple):
    """Codes, bits and scales of `reference.Layer`, and biases or None, as the oracle takes them."""

    layer: reference.Layer
    biases: Biases | None = None

    def weights(self, format: str, gate_up: str = "gate_first") -> ExpertWeights:
        said = format if format_of(format).is_mx else None
        w13, w13_scale, w2, w2_scale = self.layer
        biases = {} if self.biases is None else self.biases.arguments
        scales = w13_scale, w2_scale
        return ExpertWeights(w13, w2, *scales, **biases, gate_up=gate_up, format=said)

    def of_ranks(self, num_ranks: int) -> list[Experts]:
        """Of ranks that have as many of them each, in order; views."""
        cut = [zip(*(_cut(part, num_ranks) for part in self.layer), strict=True)]
        cut += [zip(*(_cut(part, num_ranks) for part in self.biases or (None, None)), strict=True)]
        return [
            Experts(reference.Layer(*layer), self.biases and Biases(*biases))
            for layer, biases in zip(*cut, strict=True)
        ]


def _cut(array, num: int) -> list:
    """As many rows in each of `num` parts, which are views; of None as many of it."""
    if array is None:
        return [None] * num
    return list(array.reshape(num, array.shape[0] // num, *array.shape[1:]))


def random_experts(
    layer: MoeProblem, variant: Variant, seed: int, xp, outliers: int = 0
) -> Experts:
    """Those of `reference.random_layer`, with biases where the variant has them."""
    sizes = layer.num_experts, layer.hidden, layer.intermediate
    made = reference.random_layer(*sizes, seed, xp, outliers, layer.format, layer.gated)
    if not variant.has_bias:
        return Experts(made)
    return Experts(made, random_biases(*sizes, seed + 1, xp, layer.gated))


def weight_sets(layer: MoeProblem, outliers: int = 0, variant: Variant = DEFAULT):
    """As many sets of weights as fit, 4 at most, and the experts of the first for the oracle."""
    sets = expert_sets(layer, outliers, variant)
    return [one.weights(layer.format, variant.gate_up) for one in sets], sets[0]


def expert_sets(
    layer: MoeProblem,
    outliers: int = 0,
    variant: Variant = DEFAULT,
    spare_bytes: int = SPARE_BYTES,
) -> list[Experts]:
    """As many as fit beside `spare_bytes`, from 1 to 4: the others have the first's moved."""
    import cupy

    first = random_experts(layer, variant, 1, cupy, outliers)
    cupy.get_default_memory_pool().free_all_blocks()  # what the first was put together from
    free_bytes = cupy.cuda.runtime.memGetInfo()[0] - spare_bytes
    num_sets = 1 + free_bytes // (layer.num_experts * layer.expert_bytes)
    return [first] + [
        first._replace(
            layer=reference.Layer(
                *(None if p is None else cupy.roll(p, i, axis=0) for p in first.layer)
            )
        )
        for i in range(1, max(1, min(MAX_WEIGHT_SETS, num_sets)))
    ]


def random_call(
    layer: MoeProblem,
    seed: int,
    *,
    bf16: bool = False,
    outliers: int = 0,
    routing: str = "uniform",
    zipf_exponent: float = 1.0,
    variant: Variant = DEFAULT,
) -> Call:
    """x ~ N(0, 1) and a routing of `reference.random_tokens`; x as codes and scales, or as bf16,
    as it always is where weights are.
    """
    import cupy

    if routing == "uniform" and layer.top_k > layer.num_experts:
        routing = "duplicates"
    sizes = (layer.num_tokens, layer.hidden, layer.num_experts, layer.top_k)
    tokens = reference.random_tokens(
        *sizes, seed, routing, cupy, outliers=outliers, zipf_exponent=zipf_exponent
    )
    codes, scale = quantize.tokens(tokens.x, layer.format, cupy)
    x = codes if scale is None else encode_bf16(tokens.x, cupy) if bf16 else (codes, scale)
    return Call(x, codes, scale, *tokens[1:], variant, layer.format)


def launch_ranks(calls, weights, workspace: GroupWorkspace, out, presum: bool, stream=None):
    """One launch of a LocalGroup: calls, weights and outputs by rank."""
    return mega_moe(
        [call.x for call in calls],
        [call.topk_ids for call in calls],
        [call.topk_weights for call in calls],
        weights,
        activation=calls[0].variant.activation,
        out=out,
        stream=stream,
        workspace=workspace,
        group=workspace.group,
        presum=presum,
    )


def poisoned(layer: MoeProblem):
    """An output full of NaN, as bf16 bits."""
    import cupy

    return cupy.full((layer.num_tokens, layer.hidden), 0xFFFF, cupy.uint16)


def references(call: Call, experts: Experts) -> References:
    """What `call` should give with `experts`."""
    xp = oracle_namespace()
    inputs = (call.codes, call.scale, call.topk_ids, call.topk_weights, *experts.layer)
    options = call.variant.formula | {"format": call.format, "xp": xp}
    if experts.biases is not None:
        options |= experts.biases.arguments
    return References(
        *(reference.mega_moe(*inputs, requantize=rounds, **options) for rounds in (False, True))
    )


def errors(y, refs: References) -> Errors:
    """Errors of `y`, bf16 bits [num_tokens, hidden]."""
    xp = oracle_namespace()
    return Errors(
        reference.relative_error(y, refs.exact, xp),
        reference.relative_error(y, refs.requantized, xp),
        reference.worst_element(y, refs.requantized, xp),
    )


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
