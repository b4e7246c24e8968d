"""The grouped_mm experts of transformers, its default: bf16 weights and activations."""

from __future__ import annotations

from types import SimpleNamespace

from jitmoe.peers.peer import Peer

PEER = Peer(
    "transformers grouped_mm (bf16)",
    is_block_fp8=False,
    max_error=1.5e-2,
    formats=("fp8_block", "bf16"),
)


def available() -> str | None:
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward  # noqa: F401
    except ImportError as error:
        return f"not importable: {error}"
    return None


def prepare(weights):
    import torch
    from transformers.integrations.moe import grouped_mm_experts_forward

    from jitmoe.peers.weights import BLOCK, dequantized

    num_experts = len(weights.w13)

    def gated(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    module = SimpleNamespace(  # what the function reads of an experts module
        gate_up_proj=dequantized(weights.w13, weights.w13_scale),
        down_proj=dequantized(weights.w2, weights.w2_scale),
        num_experts=num_experts,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=True,  # unused slots are masked
        _apply_gate=gated,
    )

    def call(x, x_scale, topk_ids, topk_weights):
        # It takes bf16 tokens, and for an unused slot the id num_experts.
        rows = x
        if x_scale is not None:
            rows = (x.float() * x_scale.repeat_interleave(BLOCK, 1)).bfloat16()
        ids = torch.where(topk_ids >= 0, topk_ids, num_experts)
        return grouped_mm_experts_forward(module, rows, ids, topk_weights.bfloat16())

    return call
