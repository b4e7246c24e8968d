"""Random layers and calls on the GPU, poisoned before every launch, judged by the oracle."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from jitmoe import ExpertWeights, Workspace, mega_moe, reference
from jitmoe.fp8 import encode_bf16, quantize_tokens
from jitmoe.plan.formats import format_of

# ||y - ref|| / ||ref||: rounding where the kernel rounds too, and the noise of the format. The
# tensor cores keep about 14 bits of a 128-deep sum, so activations between the GEMMs differ by 1e-4
# and one in some hundred codes falls on the other side of a tie, a step of 2^-4 away: 4e-3 on
# average, and more where few elements average: of a token of 640 channels alone, one code of the
# activations was 2.4e-2 of y (emulated with the sums of an H200, 3 of 40 such are above 1.4e-2).
EXACT_BOUND = 2.6e-2
MANY_ELEMENTS, FEW_ELEMENTS = 1 << 18, 1 << 10


def requantized_bound(num_elements: int) -> float:
    if num_elements < FEW_ELEMENTS:
        return 4e-2
    return 5e-3 if num_elements >= MANY_ELEMENTS else 1e-2


# |y - ref| / (|ref| + rms of ref's row). A code of the re-quantised activations that falls on the
# other side of a tie is off by one step of e4m3, at most 2^-4 of the largest of its group: rare
# enough to leave the norm alone, and 0.25 leaves room for four such in the same sum of one element.
WORST_BOUND = 0.25


class Layer(NamedTuple):
    codes: reference.Layer
    weights: ExpertWeights
    num_experts: int
    hidden: int
    intermediate: int


class Call(NamedTuple):
    layer: Layer
    tokens: reference.Tokens
    codes: object  # x quantised, as mega_moe does inside; if it is multiplied in bf16, its bits
    scale: object  # None then

    @property
    def fp8(self):
        return self.codes, self.scale

    @property
    def bf16(self):
        import cupy

        return encode_bf16(self.tokens.x, cupy)

    def run(self, x, workspace, **arguments):
        """One call with the workspace's scratch and the output poisoned with 0xFF first."""
        import cupy

        if workspace.scratch is not None:
            workspace.scratch.fill(0xFF)
        y = arguments.pop("out", None)
        if y is None:
            y = cupy.full(self.tokens.x.shape, 0xFFFF, cupy.uint16)
        ids = arguments.pop("topk_ids", self.tokens.topk_ids)
        router = arguments.pop("topk_weights", self.tokens.topk_weights)
        mega_moe(x, ids, router, self.layer.weights, out=y, workspace=workspace, **arguments)
        cupy.cuda.Device().synchronize()
        workspace.check()
        return y

    def reference(self, requantize=True, **variant):
        import cupy

        return reference.mega_moe(
            self.codes,
            self.scale,
            self.tokens.topk_ids,
            self.tokens.topk_weights,
            *self.layer.codes,
            requantize=requantize,
            format=self.layer.weights.format,
            xp=cupy,
            **variant,
        )

    def check(self, y, exact_bound=EXACT_BOUND, rounded_bound=None, **variant):
        import cupy

        ref = self.reference(**variant)
        rounded_bound = rounded_bound or requantized_bound(ref.size)
        assert reference.relative_error(y, ref, cupy) <= rounded_bound
        assert reference.worst_element(y, ref, cupy) <= WORST_BOUND
        exact = self.reference(requantize=False, **variant)
        assert reference.relative_error(y, exact, cupy) <= exact_bound


@pytest.fixture(scope="session")
def make_layer():
    """make_layer(num_experts, hidden, intermediate, seed=0, outliers=0, format=..., gated=True):
    memoised.
    """
    import cupy

    made = {}

    def make(
        *sizes, seed: int = 0, outliers: int = 0, format: str = "fp8_block", gated: bool = True
    ):
        key = (*sizes, seed, outliers, format, gated)
        if key not in made:
            options = {"seed": seed, "xp": cupy, "outliers": outliers}
            codes = reference.random_layer(*sizes, **options, format=format, gated=gated)
            said = format if format_of(format).is_mx else None
            scales = codes.w13_scale, codes.w2_scale
            weights = ExpertWeights(codes.w13, codes.w2, *scales, format=said)
            made[key] = Layer(codes, weights, *sizes)
        return made[key]

    yield make
    made.clear()


@pytest.fixture
def make_call(make_layer):
    """make_call(layer, num_tokens, top_k, routing="uniform", seed=1, outliers=0)."""
    import cupy

    def make(layer, num_tokens, top_k, routing="uniform", seed=1, outliers=0):
        tokens = reference.random_tokens(
            num_tokens,
            layer.hidden,
            layer.num_experts,
            top_k,
            seed=seed,
            routing=routing,
            xp=cupy,
            outliers=outliers,
        )
        if not format_of(layer.weights.format).quantizes:
            return Call(layer, tokens, encode_bf16(tokens.x, cupy), None)
        return Call(layer, tokens, *quantize_tokens(tokens.x, cupy))

    return make


@pytest.fixture
def workspace():
    return Workspace(timeout_s=20)
