// Which part of a task one math warpgroup does, and which way round.
//
// Tokens as columns: weights are the 64-row operand of the tensor cores and up to 64 tokens its columns: padding is to
// 8 or 16 tokens. The two warpgroups split a tile's 256 weight rows and share its tokens. All of decode, and tasks of
// prefill with few tokens.
// Tokens as rows: tokens are the 64-row operand and weights the columns: a thread scales its sums by two tokens, not
// sixteen. Each warpgroup takes all 256 columns for 64 tokens of its own and knows nothing of the other. Up to
// kExtraColumns more go along as columns.

constexpr u32 kWarpgroupTokens = 64;         // most tokens of one warpgroup
constexpr u32 kRowBlocks = kBlockRows / 64;  // of a weight tile
constexpr u32 kExtraColumns = 16;            // that hold a task's tokens beyond kBlockTokens
static_assert(kTileTokens <= kBlockTokens + kExtraColumns, "a task has no more extra tokens than columns for them");

// Blocks of 64 weight rows of a warpgroup.
template <bool kTokenRows>
constexpr u32 kShareBlocks = kTokenRows ? kRowBlocks : kRowBlocks / 2;

// One warpgroup's share of a task.
struct Share {
    u32 group;                    // 0 or 1
    u32 warp;                     // 0..3 in the warpgroup
    u32 first_row;                // of the weight tile
    u32 first_token, num_tokens;  // of the task's rows
};

DEVICE bool has_token_rows(const Task& task) { return kSplitTokens && task.num_rows > kWarpgroupTokens; }
DEVICE bool has_extra_tokens(const Task& task) { return kTileTokens > kBlockTokens && task.num_rows > kBlockTokens; }

DEVICE Share find_share(const Task& task) {
    const u32 warp = warp_idx() - kMathWarpBegin;
    const u32 group = warp / 4;
    if (has_token_rows(task)) {
        const u32 first = group * kWarpgroupTokens;
        return {group, warp % 4, 0, first, min_of(task.num_rows - first, kWarpgroupTokens)};
    }
    return {group, warp % 4, group * (kBlockRows / 2), 0, task.num_rows};
}

// Of the tokens beyond kBlockTokens.
DEVICE Share find_extra_share(const Task& task) {
    const u32 warp = warp_idx() - kMathWarpBegin;
    return {warp / 4, warp % 4, warp / 4 * (kBlockRows / 2), kBlockTokens, task.num_rows - kBlockTokens};
}

// Router weights that this lane keeps over the main loop of GEMM 1, for the epilogue: beside the stream of weights a
// load takes microseconds. Of tokens lane and lane + 32 as columns, of rows lane / 4 and + 8 of the warp's as rows.
template <u32 N, bool kTokenRows>
struct RouterWeights {
    static constexpr u32 kNum = kTokenRows ? 2 : ceil_div(N, kWarpThreads);
    float of[kNum] = {};

    DEVICE void load(const Params& p, const Task& task, const Share& share, const u32* pairs) {
        if (task.phase != kGemm1) return;
        const u32 first = kTokenRows ? share.warp * 16 + lane_idx() / 4 : lane_idx();
#pragma unroll
        for (u32 i = 0; i < kNum; ++i) {
            const u32 token = first + i * (kTokenRows ? 8 : kWarpThreads);
            if (token < share.num_tokens) of[i] = router_weight(p, pairs[token]);
        }
    }
};

constexpr u32 kFirstMathThread = kMathWarpBegin * kWarpThreads;

// All math warps.
DEVICE void sync_math() { sync_named(kMathBarrier, kNumMathWarps * kWarpThreads); }

// Until every tile of GEMM 1 has brought its channels to the block's rows of Params::mid. Pairs with
// role_deliver.
DEVICE void wait_for_mid(const Params& p, const Head& head, u32 block) {
    wait_until(p, kWaitMid, block, kNumTiles1,
               [&] { return load_acquire_gpu(counter(p, head, kBankBlocks + block)) == kNumTiles1; });
}
