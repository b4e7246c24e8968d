"""The fused Hopper kernel of sgl-deep-gemm, on a group of one rank."""

from __future__ import annotations

from functools import lru_cache

from jitmoe.peers.peer import Peer

PEER = Peer("sgl-deep-gemm mega MoE", is_block_fp8=True, max_error=3e-2)


def available() -> str | None:
    try:
        import deep_gemm
    except Exception as error:  # its extension is loaded, or built, at import
        return f"not importable: {type(error).__name__}: {error}".splitlines()[0]
    name = "transform_weights_for_mega_moe_sm90"
    return None if hasattr(deep_gemm, name) else f"this deep_gemm has no {name}"


def prepare(weights):
    import deep_gemm
    import torch

    num_experts, hidden, intermediate = weights.w2.shape
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(
        (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)
    )

    def call(x, x_scale, topk_ids, topk_weights):
        num_tokens = len(x)
        buffer = _buffer(num_experts, *topk_ids.shape, hidden, intermediate)
        # A call starts with arrays of the caller's: 1 to 4 us more than with them in the buffer.
        for target, source in (
            (buffer.x, x),
            (buffer.x_sf, x_scale),
            (buffer.topk_idx, topk_ids),
            (buffer.topk_weights, topk_weights),
        ):
            target[:num_tokens].copy_(source)
        y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer, num_tokens_bound=num_tokens)
        return y

    return call


@lru_cache(maxsize=1)  # calls of one size follow one another on one stream
def _buffer(num_experts, num_tokens, top_k, hidden, intermediate):
    import deep_gemm
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    sizes = (num_experts, num_tokens, top_k, hidden, intermediate)
    return deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, *sizes)
