// Which part of a task one math warpgroup does. Weights are the 64-row operand of the tensor core, tokens its columns.
//
// decode:  the two warpgroups split a tile's 256 weight rows and share its tokens.
// prefill: each takes all rows for 64 tokens of its own and knows nothing of the other.

constexpr u32 kWarpgroupTokens = 64;  // most columns of one warpgroup

// One warpgroup's share of a task.
struct Share {
    u32 group;       // 0 or 1
    u32 warp;        // 0..3 in the warpgroup
    u32 first_row;   // of the weight tile
    u32 first_token, num_tokens;  // of the task's rows
    u32 num_warps;   // that share these tokens: barriers and amax go over them
    u32 barrier;
};

DEVICE Share find_share(const Task& task) {
    const u32 warp = warp_idx() - kMathWarpBegin;
    const u32 group = warp / 4;
    if constexpr (kSplitTokens) {
        const u32 first = group * kWarpgroupTokens;
        const u32 num = task.num_rows > first ? min_of(task.num_rows - first, kWarpgroupTokens) : 0;
        return {group, warp % 4, 0, first, num, 4, kMathBarrier + group};
    } else {
        return {group, warp % 4, group * (kBlockRows / 2), 0, task.num_rows, 8, kMathBarrier};
    }
}

// Which variant of the scale products row block `m` of this warp takes (gather: publish_k_block).
DEVICE u32 scale_variant(bool gemm_2, u32 m) {
    const u32 warp = warp_idx() - kMathWarpBegin;
    const u32 first_row = kSplitTokens ? 0 : warp / 4 * (kBlockRows / 2);
    if (gemm_2) return (first_row + m * 64) / 128;
    if constexpr (kUpBlockRest == 0) return 0;
    const u32 channel = (first_row + m * 64 + warp % 4 * 16) / 2;
    return channel >= 128 - kUpBlockRest ? 1 : 0;
}
