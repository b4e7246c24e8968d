"""A small layer and its tokens as PyTorch tensors, and what the oracle says of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitmoe import fp8, reference

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 128, 2
LAYER = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1)
WEIGHTS = (
    torch.from_numpy(LAYER.w13).view(torch.float8_e4m3fn),
    torch.from_numpy(LAYER.w2).view(torch.float8_e4m3fn),
    torch.from_numpy(LAYER.w13_scale),
    torch.from_numpy(LAYER.w2_scale),
)
# The same in bf16, from another draw.
BF16_LAYER = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format="bf16")
BF16_WEIGHTS = tuple(
    torch.from_numpy(part).view(torch.bfloat16) for part in (BF16_LAYER.w13, BF16_LAYER.w2)
)
# Experts without a gate, in bf16 and in FP8.
NO_GATE_BF16, NO_GATE = (
    reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format=format, gated=False)
    for format in ("bf16", "fp8_block")
)


def no_gate_weights(layer):
    """Of NO_GATE_BF16 or NO_GATE, in the order of WEIGHTS."""
    dtype = torch.bfloat16 if layer.w13_scale is None else torch.float8_e4m3fn
    weights = [torch.from_numpy(part).view(dtype) for part in (layer.w13, layer.w2)]
    scales = (layer.w13_scale, layer.w2_scale)
    return (*weights, *(torch.from_numpy(scale) for scale in scales if scale is not None))


def fp8_layer(scales: str):
    """One with scales of another kind, "channel" or "tensor": (layer, weights) as above."""
    layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format=f"fp8_{scales}")
    codes = (torch.from_numpy(part).view(torch.float8_e4m3fn) for part in (layer.w13, layer.w2))
    return layer, (*codes, torch.from_numpy(layer.w13_scale), torch.from_numpy(layer.w2_scale))


def mx_layer(format: str):
    """One in MXFP4: (layer, weights) as above."""
    layer = reference.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, seed=1, format=format)
    return layer, tuple(map(torch.from_numpy, (layer.w13, layer.w2, *layer[1::2])))


def quantized_by_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as e4m3 codes and a scale for each token [num_tokens, 1]."""
    scale = x.float().abs().amax(dim=1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


class Tokens(NamedTuple):
    """In the order of `mega_moe`; a third of the slots are unused."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def tokens(num_tokens: int, seed: int = 2) -> Tokens:
    made = reference.random_tokens(num_tokens, HIDDEN, EXPERTS, TOP_K, seed, routing="unused")
    x, ids, router = map(torch.from_numpy, made)
    return Tokens(x.bfloat16(), ids, router)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as e4m3 codes and their scales."""
    codes, scale = fp8.quantize_tokens(x.float().numpy())
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scale)


def error(y: torch.Tensor, given, layer=LAYER, x=None, **variant) -> float:
    """y's relative error to the oracle that rounds where the kernel does; `variant` is of
    `reference.mega_moe`. `x` are codes and scales of tokens in place of those of `given`.
    """
    rows, ids, router = (tensor.float().numpy() for tensor in given)
    scale = None
    if x is not None:
        rows = x[0].view(torch.uint8).numpy()
        scale = x[1].expand(-1, HIDDEN // 128).numpy()
    args = rows, scale, ids.astype("i8"), router, *layer
    ref = reference.mega_moe(*args, requantize=True, **variant)
    return reference.relative_error(y.float().numpy(), ref)
