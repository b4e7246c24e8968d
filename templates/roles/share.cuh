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

// Groups of 128 channels between the GEMMs, with a scale each, of a tile of GEMM 1: one, beside as many rows of up, or
// without a gate two, of a warpgroup each where tokens are columns.
constexpr u32 kTileGroups = kTileChannels / 128;

// Without a gate, the last tile lacks its second group where there are an odd number.
DEVICE bool has_group(const Task& task, u32 group) {
    constexpr u32 kGroups = kMidStride / 128;
    return kGroups % 2 == 0 || task.tile * 2 + group < kGroups;
}

// Tokens as columns: where 8 channels of a warp begin in the tile. Its 16 rows of a row block are 8 channels with their
// up, or without a gate two times 8.
DEVICE u32 first_channel(const Share& share, u32 row_block, u32 half) {
    const u32 row = share.first_row + row_block * 64;
    return kGated ? row / 2 + share.warp * 8 : row + share.warp * 16 + half * 8;
}

// Tokens as rows: the sums, of two tokens each, of the tile's 8 channels from 8 * `eight` on. 64 columns are four times
// 8 channels and their up by turns, or without a gate eight times 8.
template <u32 N>
DEVICE const float* sums_of_channels(const float (&sums)[kShareBlocks<true>][N / 2], u32 eight) {
    constexpr u32 kStep = kGated ? 8 : 4, kEights = N / 2 / kStep;
    return sums[eight / kEights] + eight % kEights * kStep;
}

// Router weights that this lane keeps over the main loop, for the epilogue of GEMM 1 and biases of GEMM 2: beside the
// stream of weights a load takes microseconds. Of tokens lane and lane + 32 as columns, of rows lane / 4 and + 8 of the
// warp's as rows.
template <u32 N, bool kTokenRows>
struct RouterWeights {
    static constexpr u32 kNum = kTokenRows ? 2 : ceil_div(N, kWarpThreads);
    float of[kNum] = {};

    DEVICE void load(const Params& p, const Task& task, const Share& share, const u32* pairs) {
        constexpr bool kWeighsBias = kHasBias && !kWeightOnInput;
        if (task.phase != kGemm1 && !kWeighsBias) return;
        const u32 first = kTokenRows ? share.warp * 16 + lane_idx() / 4 : lane_idx();
#pragma unroll
        for (u32 i = 0; i < kNum; ++i) {
            const u32 token = first + i * (kTokenRows ? 8 : kWarpThreads);
            if (token < share.num_tokens) of[i] = router_weight(p, pairs[token]);
        }
    }
};

// The router weight of the lane's token j * 8 + lane % 4 * 2 + i, of tokens as columns.
template <u32 N>
DEVICE float token_weight(const RouterWeights<N, false>& weights, u32 j, u32 i) {
    return __shfl_sync(kFullMask, weights.of[j / 4], (j * 8 + lane_idx() % 4 * 2 + i) % kWarpThreads);
}

constexpr u32 kFirstMathThread = kMathWarpBegin * kWarpThreads;

// All math warps.
DEVICE void sync_math() { sync_named(kMathBarrier, kNumMathWarps * kWarpThreads); }
