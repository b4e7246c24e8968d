"""torch's FP8 grouped GEMM, which has a scale for each row of both operands."""

from __future__ import annotations

from jitmoe.peers.peer import Peer
from jitmoe.peers.torch_grouped_mm import no_grouped_mm

PEER = Peer("torch scaled_grouped_mm (row scales)", is_block_fp8=False, max_error=7.5e-2)


def available() -> str | None:
    return no_grouped_mm("scaled_grouped_mm")


def prepare(weights):
    import torch
    from torch.nn.functional import ScalingType, scaled_grouped_mm

    from jitmoe.peers import steps
    from jitmoe.peers.weights import row_quantized

    w13, w13_scale = row_quantized(weights.w13, weights.w13_scale)
    w2, w2_scale = row_quantized(weights.w2, weights.w2_scale)

    def gemm(rows, scale, w, w_scale, ends):
        by_row = ScalingType.RowWise
        return scaled_grouped_mm(
            rows,
            w.transpose(1, 2),
            scale,
            by_row,
            w_scale,
            by_row,
            offs=ends,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def call(x, x_scale, topk_ids, topk_weights):
        pairs = steps.sort_pairs(topk_ids, len(w13))
        rows, scale = steps.gather(x, x_scale, pairs.tokens, quantize=True)
        mid, mid_scale = steps.swiglu(gemm(rows, scale, w13, w13_scale, pairs.ends), quantize=True)
        y = gemm(mid, mid_scale, w2, w2_scale, pairs.ends)
        return steps.combine(y, pairs.places, topk_weights)

    return call
