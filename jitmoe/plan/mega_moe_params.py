"""Parameters of the fused layer's kernel: what `fused.py` and the emulator fill in, by name and in
this order.
"""

from __future__ import annotations

from jitmoe.plan.plan import Param

# Symmetric regions, in the order of their offsets among the parameters.
SYMMETRIC = (
    *("launches", "pairs_ready", "tokens_ready", "expert_done", "bounds"),
    *("pair_experts", "pair_weights"),
    *("staged_x", "staged_scale", "slots"),
)


def params(
    trace: bool, has_bias: bool, has_channel_scales: bool, many_ranks: bool
) -> tuple[Param, ...]:
    """The fields of the parameter struct; tensor maps come first."""
    half = (Param("w13_scale_half_stride", "i64", "elements, from gate to up"),)
    bias = (
        Param("w13_bias", "const u8*", "[num_experts, 2*intermediate] bf16 or f32"),
        Param("w2_bias", "const u8*", "[num_experts, hidden], of the same type"),
        Param("w13_bias_stride", "i64", "bytes from expert to expert"),
        Param("w2_bias_stride", "i64", "bytes"),
        Param("bias_bytes", "i64", "of an element"),
    )
    ranks = (
        Param("peers", "u8* const*", "symmetric memory of every rank"),
        *(Param(f"{name}_at", "i64", "bytes into it") for name in SYMMETRIC),
        Param("rank", "u32"),
        Param("rank_tokens", "u32", "rows of every rank in the batch of all, num_tokens"),
        Param("num_own_tokens", "u32", "of them, that this rank has tokens for"),
        Param("rank_capacity", "u32", "rank_tokens that symmetric memory has room for"),
        Param("num_logical_experts", "u32", "rows of expert_map"),
        Param("max_replicas", "u32", "columns of expert_map"),
    )
    expert_map = Param("expert_map", "const u32*", "[logical expert, replica] i32, or null")
    return (
        Param("w13_map", "TensorMap", "(hidden, 8 rows, gate|up, intermediate/8, expert) or as w2"),
        Param("w2_map", "TensorMap", "(intermediate, hidden, expert)"),
        Param("pool_map", "TensorMap", "(hidden, row), prefill"),
        Param("mid_map", "TensorMap", "(mid_stride, row), prefill"),
        Param("pool_extra_map", "TensorMap", "as pool_map, for a tile's extra tokens"),
        Param("mid_extra_map", "TensorMap", "as mid_map, for a tile's extra tokens"),
        Param("x", "const u8*", "[num_tokens, hidden] e4m3 or bf16"),
        Param("x_scale", "const float*", "[num_tokens, hidden/128] by its strides, e4m3 only"),
        Param("topk_ids", "const u8*", "[num_tokens, top_k] i32 or i64"),
        Param("topk_weights", "const u8*", "[num_tokens, top_k] f32 or bf16"),
        Param(
            "w13_scale",
            "const float*",
            "[num_experts, ceil(2*intermediate/128), hidden/128], or of channels, or null",
        ),
        Param(
            "w2_scale", "const float*", "[num_experts, hidden/128, ceil(intermediate/128)] or null"
        ),
        Param("y", "u16*", "[num_tokens, hidden] bf16"),
        Param("expert_counts", "u32*", "[num_experts] i32, or null"),
        *([expert_map] if many_ranks else []),
        Param("pool", "u8*", "scratch: decode, x if quantised here; prefill, its rows by expert"),
        Param("pool_scale", "float*", "scratch: [token][group]; prefill, [group][row]"),
        Param("row_pairs", "u32*", "scratch, by row; in prefill with its use"),
        Param("mid", "u8*", "scratch"),
        Param("mid_scale", "float*", "scratch, [group][row]"),
        Param("slices", "u16*", "scratch, [num_tokens, top_k, hidden] bf16"),
        Param("parts", "float*", "scratch, decode: [GEMM][part][tile's sums]"),
        *([Param("trace", "uint4*", "scratch, [block][warp][stamp]")] if trace else []),
        Param("header", "u32*", "control"),
        Param("banks", "u32*", "control"),
        Param("combine_count", "u32*", "control, [num_tokens, num_tiles_2]"),
        Param("status", "u32*", "host memory, read by the host after a timeout"),
        *(bias if has_bias else ()),
        Param("x_stride", "i64", "bytes from token to token"),
        Param("x_scale_token_stride", "i64", "elements"),
        Param("x_scale_group_stride", "i64", "elements"),
        Param("w13_scale_expert_stride", "i64", "elements"),
        Param("w2_scale_expert_stride", "i64", "elements"),
        Param("w13_scale_row_stride", "i64", "elements"),
        Param("w2_scale_row_stride", "i64", "elements"),
        *(half if has_channel_scales else ()),
        Param("y_stride", "i64", "elements"),
        Param("num_tokens", "u32"),
        Param("bank_words", "u32"),
        Param("first_stride", "u32", "between the first tasks of neighbouring blocks"),
        Param("row_capacity", "u32", "rows of pool and mid, and from group to group of scales"),
        Param("x_is_bf16", "u32"),
        Param("ids_are_i64", "u32"),
        Param("weights_are_bf16", "u32"),
        Param("timeout_us", "u32", "budget of every wait"),
        Param("alpha", "f32", "of the clamped activation"),
        Param("limit", "f32", "of the clamped activation"),
        Param("up_offset", "f32", "of the clamped activation"),
        Param("mid_scale_unit", "f32", "routed_scaling_factor / 448; bf16, routed_scaling_factor"),
        Param("first_expert", "u32", "id of expert 0 of the weights"),
        *(ranks if many_ranks else ()),
    )
