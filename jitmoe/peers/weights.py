"""Checkpoint weights in the formats of peers that have no block scales; torch tensors."""

from __future__ import annotations

BLOCK = 128
E4M3_MAX = 448.0


def dequantized(codes, scale):
    """e4m3 [experts, rows, cols] with scales of blocks of 128 x 128, as bf16; bf16 as it is."""
    if scale is None:
        return codes
    import torch

    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    for expert, row in enumerate(out):
        row.copy_(_values(codes[expert], scale[expert]))
    return out


def row_quantized(codes, scale):
    """The same as e4m3 with one f32 scale for each row: codes, scales [experts, rows]."""
    import torch

    out = torch.empty_like(codes)
    row_scale = torch.empty(codes.shape[:2], dtype=torch.float32, device=codes.device)
    for expert, row in enumerate(out):
        values = _values(codes[expert], scale[expert])
        row_scale[expert] = values.abs().amax(dim=1).clamp(min=1e-10) / E4M3_MAX
        row.copy_(values / row_scale[expert, :, None])
    return out, row_scale


def _values(codes, scale):
    """One expert's, in f32."""
    rows, cols = codes.shape
    wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return codes.float() * wide
