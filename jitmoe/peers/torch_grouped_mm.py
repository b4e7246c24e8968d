"""torch's bf16 grouped GEMM on dequantised weights: twice the bytes, hardly an error."""

from __future__ import annotations

from jitmoe.peers.peer import Peer

PEER = Peer(
    "torch grouped_mm (bf16)", is_block_fp8=False, max_error=1e-2, formats=("fp8_block", "bf16")
)


def available() -> str | None:
    return no_grouped_mm("grouped_mm")


def no_grouped_mm(name: str) -> str | None:
    """Why torch's function of that name, or Triton for the steps around it, is missing."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"not importable: {error}"
    if not hasattr(torch.nn.functional, name):
        return f"torch {torch.__version__} has no torch.nn.functional.{name}; take 2.10 or later"
    return None


def prepare(weights):
    from torch.nn.functional import grouped_mm

    from jitmoe.peers import steps
    from jitmoe.peers.weights import dequantized

    w13 = dequantized(weights.w13, weights.w13_scale)
    w2 = dequantized(weights.w2, weights.w2_scale)

    def call(x, x_scale, topk_ids, topk_weights):
        pairs = steps.sort_pairs(topk_ids, len(w13))
        if x_scale is None:
            rows = x.index_select(0, pairs.tokens)
        else:
            rows, _ = steps.gather(x, x_scale, pairs.tokens, quantize=False)
        gate_up = grouped_mm(rows, w13.transpose(1, 2), offs=pairs.ends)
        mid, _ = steps.swiglu(gate_up, quantize=False)
        y = grouped_mm(mid, w2.transpose(1, 2), offs=pairs.ends)
        return steps.combine(y, pairs.places, topk_weights)

    return call
