// Which part of a task one math warpgroup does.
//
// decode:  weights are the 64-row operand of the tensor cores and up to 64 tokens its columns: padding is to 8 tokens.
// The
//          two warpgroups split a tile's 256 weight rows and share its tokens.
// prefill: tokens are the 64-row operand and weights the columns: a thread scales its sums by two tokens, not sixteen.
//          Each warpgroup takes all 256 columns for 64 tokens of its own and knows nothing of the other.

constexpr u32 kWarpgroupTokens = 64;  // most columns of one warpgroup

// One warpgroup's share of a task.
struct Share {
    u32 group;                    // 0 or 1
    u32 warp;                     // 0..3 in the warpgroup
    u32 first_row;                // of the weight tile
    u32 first_token, num_tokens;  // of the task's rows
    u32 num_warps;                // that share these tokens: barriers and amax go over them
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

DEVICE void sync_share(const Share& share) { sync_named(share.barrier, share.num_warps * kWarpThreads); }

// Until every tile of GEMM 1 has brought its channels to the block's rows of Params::mid. Pairs with publish_mid or
// role_deliver.
DEVICE void wait_for_mid(const Params& p, const Head& head, u32 block) {
    wait_until(p, kWaitMid, block, kNumTiles1,
               [&] { return load_acquire_gpu(counter(p, head, kBankBlocks + block)) == kNumTiles1; });
}
