"""Static scales of activations, as calibrated checkpoints of FP8 models have them.

Such a scale, of the inputs of GEMM 1 or of GEMM 2, is what codes are multiplied by: x ~ scale *
e4m3(x / scale), cut off at 448 * scale. Each product is multiplied by it again, so it rounds and
cuts off, and means nothing else. The kernel quantises x in bf16, and always what lies between the
GEMMs, per token and 128 channels by the largest value there, which is finer and cuts nothing off;
so these scales are checked and not applied. One that x was quantised with before is its x_scale.
"""

from __future__ import annotations

import math

import torch


def check_static(scales: dict[str, torch.Tensor | None], num_experts: int) -> None:
    """Raise ValueError unless each scale is None, or one number or one for each expert, with
    dimensions of 1 or not, all of them positive and finite.

    Values are read once and kept with the tensor, until that is written; not while torch.compile
    traces, or a CUDA graph is captured.
    """
    for name, scale in scales.items():
        if scale is None:
            continue
        if scale.numel() != 1 and tuple(scale.squeeze().shape) != (num_experts,):
            raise ValueError(
                f"{name} must be one number or one for each of {num_experts} experts, got shape "
                f"{list(scale.shape)}; pass the scale of one tensor of activations"
            )
        if not torch.compiler.is_compiling():
            _check_values(name, scale)


def x_scale_of(scale: torch.Tensor | None) -> torch.Tensor | None:
    """As an x_scale of `jitmoe.mega_moe`: one for all tokens may come with dimensions of 1."""
    return scale.reshape(1) if scale is not None and scale.numel() == 1 else scale


def _check_values(name: str, scale: torch.Tensor) -> None:
    # Those of inference mode have no version; a write is missed then, and no result depends on it.
    state = scale.data_ptr(), None if scale.is_inference() else scale._version
    if getattr(scale, "_jitmoe_static", None) == state:
        return
    if scale.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    for number in scale.detach().float().flatten().tolist():
        if not (math.isfinite(number) and number > 0):
            raise ValueError(
                f"{name} must be positive and finite, got {number}; pass the checkpoint's scale"
            )
    scale._jitmoe_static = state
