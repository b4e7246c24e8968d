"""Static scales of activations as vLLM, SGLang and transformers apply them, in float64.

A scale is what codes are multiplied by, one for all experts or one for each: inputs of GEMM 1 and
GEMM 2 become scale * e4m3(x / scale), cut off at 448 * scale. vLLM and SGLang take the largest of
a checkpoint's scales of experts for all, transformers each expert's own.
"""

from __future__ import annotations

import torch
from torch_layer import EXPERTS, Tokens, tokens

E4M3_MAX = 448.0


def quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of x."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def outliers(num_tokens: int) -> Tokens:
    """Tokens the first of which is 4096 times as large as the others: a static scale that holds it
    leaves few bits to these.
    """
    given = tokens(num_tokens)
    given.x[0] *= 4096
    return given


def layer(given: Tokens, weights, a1=None, a2=None, seen=None) -> torch.Tensor:
    """y with static scales [1] or [experts] of the inputs, without them exactly. What experts get
    as inputs of GEMM 2 is noted in `seen`: their largest by expert.

    weights  w13, w2, w13_scale, w2_scale of channels or of experts, or halves of w13
    """
    w13, w2 = (_values(*pair) for pair in zip(weights[:2], weights[2:], strict=True))
    a1, a2 = (None if scale is None else scale.expand(EXPERTS) for scale in (a1, a2))
    y = torch.zeros(given.x.shape, dtype=torch.float64)
    for token, ids in enumerate(given.topk_ids.tolist()):
        for slot, expert in enumerate(ids):
            if not 0 <= expert < EXPERTS:
                continue
            x = _through(given.x[token].double(), a1, expert)
            gate, up = (w13[expert] @ x).chunk(2)
            mid = torch.nn.functional.silu(gate) * up
            if seen is not None:
                seen[expert] = max(seen.get(expert, 0.0), mid.abs().max().item())
            weight = given.topk_weights[token, slot].double()
            y[token] += weight * (w2[expert] @ _through(mid, a2, expert))
    return y


def calibrated(given: Tokens, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the inputs that hold all of these tokens: of GEMM 1 [], of GEMM 2 [experts]."""
    seen: dict[int, float] = {}
    layer(given, weights, seen=seen)
    mids = torch.tensor([seen.get(expert, max(seen.values())) for expert in range(EXPERTS)])
    return given.x.abs().max().float() / E4M3_MAX, mids / E4M3_MAX


def noise(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative errors of tokens, their mean over those that have an expert."""
    of_token = (y.double() - exact).norm(dim=1), exact.norm(dim=1)
    used = of_token[1] > 0
    return (of_token[0][used] / of_token[1][used]).mean().item()


def _through(x: torch.Tensor, scale, expert: int) -> torch.Tensor:
    if scale is None:
        return x
    return quantized(x, scale[expert]).double() * scale[expert].double()


def _values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights, of scales [experts, rows] or [experts, 1 or 2] in halves of rows."""
    scale = scale.reshape(EXPERTS, -1).double()
    return codes.double() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)[..., None]
