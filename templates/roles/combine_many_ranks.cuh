// The end of a launch on many ranks: a rank tells all others of an expert that it is through with, and adds up the rows
// of its tokens as they come, in slot order.

// Lane l sums 8 channels of every token's rows, those of the slots in `used`; `store(t, sum)` puts them where they
// belong. Not all slots are used: four rows of a token are loaded at a time.
template <typename Store>
DEVICE void sum_rows(const u16* first_row, const u32 (&tokens)[kCombineTokens], const u32 (&used)[kCombineTokens],
                     u32 tile, Store store) {
    constexpr u32 kRows = min_of(kTopK, 4u);
    const u32 channel = tile * kBlockRows + lane_idx() * 8;
    if (channel >= kHidden) return;
    float sums[kCombineTokens][8] = {};
    u32 rest[kCombineTokens], any = 0;
#pragma unroll
    for (u32 t = 0; t < kCombineTokens; ++t) any |= rest[t] = used[t];
#pragma unroll 1
    while (any != 0) {
        uint4 rows[kCombineTokens][kRows] = {};
        any = 0;
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
#pragma unroll
            for (u32 i = 0; i < kRows; ++i) {
                if (rest[t] == 0) continue;
                const u64 row = u64(tokens[t]) * kTopK + __ffs(rest[t]) - 1;
                rows[t][i] = *reinterpret_cast<const uint4*>(first_row + row * kHidden + channel);
                rest[t] &= rest[t] - 1;
            }
            any |= rest[t];
        }
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
#pragma unroll
            for (u32 i = 0; i < kRows; ++i) add_channels(sums[t], rows[t][i]);
        }
    }
#pragma unroll
    for (u32 t = 0; t < kCombineTokens; ++t) store(t, pack_channels(sums[t]));
}

// After the rows of a tile of GEMM 2 are on their way. One whole warp, of `warps` that do so for every tile; pairs with
// combine_ranks.
DEVICE void finish_expert_tile(const Params& p, const Smem& smem, const Head& head, u32 expert, u32 warps) {
    const u32 tiles = (smem.block_start[expert + 1] - smem.block_start[expert]) * kNumTiles2;
    const i64 at = p.expert_done_at + i64(p.rank * kNumExperts + expert) * 4;
    tell_ranks(p, head, kBankDone + expert, warps * tiles, at);
}

// Slots of a token of this rank that hold a row, once all of them do: of ranks that sum their own, the first of each.
// One whole warp.
DEVICE u32 wait_for_slots(const Params& p, u32 token) {
    const u32 lane = lane_idx();
    const u64 first_pair = u64(p.rank * p.rank_tokens + token) * kTopK;
    const u32 expert = lane < kTopK ? pair_experts(p, p.rank)[first_pair + lane] : kUnused;
    const u32* done = symmetric<u32>(p, p.rank, p.expert_done_at);
    u32 owing = 0;
    wait_until<true>(p, kWaitExpert, owing, launch_number() + 1, [&] {
        const u32 unset = __ballot_sync(kFullMask, expert != kUnused && !is_set(done + expert));
        if (unset != 0) owing = __shfl_sync(kFullMask, expert, __ffs(unset) - 1);
        return unset == 0;
    });
    sync_warp();  // what the lanes have acquired is ordered before every lane's loads
    bool holds = expert != kUnused;
#pragma unroll 1
    for (u32 slot = 0; kPresum && slot + 1 < kTopK; ++slot) {
        const u32 before = __shfl_sync(kFullMask, expert, slot);
        if (slot < lane && before != kUnused && before / kNumExperts == expert / kNumExperts) holds = false;
    }
    return __ballot_sync(kFullMask, holds);
}

// Warps `first_warp` .. of every CTA, when their tasks are done: y of this rank's tokens. A warp asks once whether the
// rows of its tokens are there, and sums as many tiles of them as leave no warp without any.
DEVICE void combine_ranks(const Params& p, u32 first_warp, u32 warps) {
    const u16* slots = symmetric<u16>(p, p.rank, p.slots_at);
    const u32 num_groups = ceil_div(p.num_own_tokens, kCombineTokens), num_warps = warps * num_blocks();
    const u32 num_tiles = min_of(ceil_div(num_groups * kNumTiles2, num_warps), kNumTiles2);
    const u32 num_runs = num_groups == 0 ? 0 : ceil_div(kNumTiles2, num_tiles);
    for (u32 i = (warp_idx() - first_warp) * num_blocks() + block_idx(); i < num_groups * num_runs; i += num_warps) {
        u32 tokens[kCombineTokens], used[kCombineTokens];
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
            const u32 token = i / num_runs * kCombineTokens + t;
            tokens[t] = min_of(token, p.num_own_tokens - 1);
            used[t] = wait_for_slots(p, tokens[t]);
        }
        const u32 first = i % num_runs * num_tiles, end = min_of(first + num_tiles, kNumTiles2);
#pragma unroll 1
        for (u32 tile = first; tile < end; ++tile) {
            const u32 channel = tile * kBlockRows + lane_idx() * 8;
            sum_rows(slots, tokens, used, tile, [&](u32 t, uint4 sum) {
                *reinterpret_cast<uint4*>(p.y + i64(tokens[t]) * p.y_stride + channel) = sum;
            });
        }
    }
}

// Prefill: until the math warps have summed their last lists; pairs with end_sums.
DEVICE void wait_for_sums(const Params& p, Smem& smem) { wait_barrier(p, kWaitSummed, &smem.summed[0], 0, 0); }
DEVICE void init_sums(Smem& smem) { init_barrier(&smem.summed[0], kNumMathWarps * kWarpThreads); }
DEVICE void end_sums(Smem& smem) { arrive(&smem.summed[0]); }
