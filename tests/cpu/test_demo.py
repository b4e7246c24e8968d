"""Parts of the demo on a GPU that need none."""

from io import StringIO

import pytest
from rich.console import Console

from jitmoe import demo, demo_gpu, measure
from jitmoe.jit import nvrtc
from jitmoe.plan.formats import FORMATS
from jitmoe.plan.models import MODELS

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
    fits = 2 * num_experts * layer.expert_bytes + measure.SPARE_BYTES <= free_gib * GIB
    assert fits or num_experts == 1


@pytest.mark.parametrize("format", FORMATS)
def test_small_layers_of_gpt_oss(format):
    """With biases and interleaved rows, in every bucket that there is."""
    said = StringIO()
    variant = MODELS["gpt-oss-20b"].variant
    assert demo.demo_emulated(Console(file=said, width=200), variant, format)
    text = said.getvalue()
    if "No kernel was executed" not in text:
        num_passes = text.count("PASS")
        assert num_passes == len(demo.small_plans(variant, format)) > 0


def test_matrix_product_compiles():
    assert nvrtc.compile(measure._MATMUL, "sm_90a", "matmul.cu").resources.num_regs > 0
