"""Scales of weights in e8m0 as the kernel takes them, made once and kept with the tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jitmoe.mxfp4 import (
    MX_GROUP,
    PACKED_GROUPS,
    ROW_UNIT,
    SCALE_OFFSET,
    TOP_EXPONENT,
    check_largest,
    tile_rows,
)

_E8M0 = getattr(torch, "float8_e8m0fnu", None)  # PyTorch 2.7 and later
_E8M0_TYPES = (_E8M0, torch.uint8)
# Two e2m1 codes each, as checkpoints hold them beside uint8; the former in PyTorch 2.8 and later.
_E2M1_TYPES = (getattr(torch, "float4_e2m1fn_x2", None), torch.int8)


def f32(scale: torch.Tensor | None) -> torch.Tensor | None:
    """Scales of FP8 in e8m0 as f32, made once and kept with the tensor; others as they are."""
    if scale is None or scale.dtype not in _E8M0_TYPES:
        return scale
    return _kept(scale, "_jitmoe_f32", "", _widened)


def mx_codes(weights: torch.Tensor) -> torch.Tensor:
    """Packed codes as uint8, a view."""
    return weights.view(torch.uint8) if weights.dtype in _E2M1_TYPES else weights


def packed(
    scale: torch.Tensor | None,
    name: str,
    codes: torch.Tensor,
    format: str,
    gate_up: str | None = None,
) -> torch.Tensor | None:
    """Scales of MXFP4 by `pack_scales`, made once and kept with the tensor; packed ones as they
    are.

    codes    the weights that they are of; of another shape, ExpertWeights refuses both

    Raises ValueError for other dtypes and shapes, and RuntimeError during the capture of a CUDA
    graph.
    """
    if scale is None or scale.dtype == torch.int32:
        return scale
    if scale.dtype not in _E8M0_TYPES:
        raise ValueError(
            f"{name} must have dtype e8m0 or u8, got {str(scale.dtype).removeprefix('torch.')}; "
            "convert or view it"
        )

    def pack(scale: torch.Tensor) -> torch.Tensor:
        if codes.dim() == 3:
            wanted = *codes.shape[:2], 2 * codes.shape[2] // MX_GROUP
            if scale.shape != wanted:
                raise ValueError(
                    f"{name} must have shape {list(wanted)}, got {list(scale.shape)}; pass a scale "
                    f"for each {MX_GROUP} weights of a row"
                )
        if scale.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name} is to be packed once, which cannot be done during the capture of a CUDA "
                "graph; call the layer before it, or pass scales of pack_scales"
            )
        return pack_scales(scale, format, gate_up)

    return _kept(scale, "_jitmoe_packed", (format, gate_up), pack)


def pack_scales(scale: torch.Tensor, format: str, gate_up: str | None = None) -> torch.Tensor:
    """Scales of MXFP4 in the order of the kernel, for calls with this format and order alone.

    scale    [num_experts, rows, cols / 32] e8m0, or uint8 of the same bits
    format   "mxfp4_fp8" or "mxfp4_bf16"
    gate_up  of w13_scale the order of its rows, None for w2_scale and without a gate
    returns  int32, the bits of `jitmoe.quantize.pack_scales`

    Waits for the GPU. Raises ValueError for a scale that the kernel cannot multiply by, NaN among
    them.
    """
    codes = scale.detach().view(torch.uint8)
    check_largest(int(codes.max()), format)
    num_pads = 0, -codes.shape[2] % PACKED_GROUPS[format]
    if format == "mxfp4_bf16":
        raised = torch.nn.functional.pad(codes + SCALE_OFFSET, num_pads)
        return _in_tiles(raised.contiguous().view(torch.int32), format, gate_up)
    largest = codes.amax(-1, keepdim=True)
    exponents = TOP_EXPONENT - (largest - codes).clamp(max=TOP_EXPONENT)
    exponents = torch.nn.functional.pad(exponents, num_pads)
    pairs = (exponents[..., ::2] | exponents[..., 1::2] << 4).contiguous()
    of_blocks = _in_tiles(pairs.view(torch.int16), format, gate_up).flatten(2)
    of_rows = _in_tiles((_widened(largest) * ROW_UNIT).view(torch.int32), None, gate_up)
    return torch.cat([of_rows.flatten(2), of_blocks.view(torch.int32)], dim=-1)


def _in_tiles(values: torch.Tensor, format: str | None, gate_up: str | None) -> torch.Tensor:
    """As mxfp4.pack_scales brings [num_experts, rows, k_blocks] into the order of the kernel."""
    at = torch.from_numpy(tile_rows(values.shape[1], format, gate_up)).to(values.device)
    taken = values[:, at.clamp(min=0)].masked_fill_((at < 0)[..., None], 0)
    return taken.transpose(2, 3).contiguous()


def _kept(scale: torch.Tensor, attribute: str, kind, make: Callable) -> torch.Tensor:
    """make(scale), kept with the tensor for the same `kind`.

    It is made anew where the tensor lies elsewhere or was written since, but a write through
    `.data` leaves no trace.
    """
    if scale.is_inference():  # has no version
        return make(scale)
    state = scale.data_ptr(), scale._version, kind
    known = getattr(scale, attribute, None)
    if known is None or known[0] != state:
        known = state, make(scale)
        # Made during a capture, it is the graph's, and holds nothing before that runs.
        if not (scale.is_cuda and torch.cuda.is_current_stream_capturing()):
            setattr(scale, attribute, known)
    return known[1]


def _widened(scale: torch.Tensor) -> torch.Tensor:
    wide = scale.detach().view(_E8M0)  # of either of _E8M0_TYPES
    return wide.to(torch.float32, memory_format=torch.contiguous_format)
