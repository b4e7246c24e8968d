"""Parts of the demo on a GPU that need none."""

import numpy as np
import pytest

from jitmoe import demo_gpu, reference
from jitmoe.fp8 import decode_bf16, dequantize_tokens
from jitmoe.jit import nvrtc
from jitmoe.plan.models import MODELS
from jitmoe.plan.problem import MoeProblem

GIB = 1 << 30


@pytest.mark.parametrize(
    "name, free_gib, num_experts",
    [
        ("deepseek-v3", 140, 256),
        ("deepseek-v3", 24, 128),
        ("deepseek-v3", 8, 16),
        ("qwen3-30b-a3b", 40, 128),
        ("mixtral-8x7b", 1, 1),
    ],
)
def test_experts_are_reduced_to_fit(name, free_gib, num_experts):
    layer = demo_gpu.fit_experts(MODELS[name].problem(8), free_gib * GIB)
    assert layer.num_experts == num_experts
    fits = 2 * num_experts * layer.expert_bytes + demo_gpu.SPARE_BYTES <= free_gib * GIB
    assert fits or num_experts == 1


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("top_k", [2, 6])
def test_random_calls(kind, top_k):
    layer = MoeProblem(5, 256, 64, 4, top_k)
    call = demo_gpu._random_call(layer, kind, 3, np)
    assert call.topk_ids.shape == (5, top_k) and call.topk_ids.max() < 4
    wide = dequantize_tokens(call.codes, call.scale)
    if kind == "bf16":
        assert call.x.dtype == np.uint16
        assert reference.relative_error(wide, decode_bf16(call.x)) < 0.04
    else:
        assert call.x[0] is call.codes and call.x[1] is call.scale
    assert np.isnan(decode_bf16(demo_gpu._poisoned(layer, np))).all()


def test_matrix_product_compiles():
    assert nvrtc.compile(demo_gpu._MATMUL, "sm_90a", "matmul.cu").resources.num_regs > 0
