// The head's common parts. It is run by every warp before the roles part: sort the routed pairs by expert, and bring
// the tokens into the form the bucket reads (head_decode, head_prefill). A pair is token * top_k + slot; a row is a
// pair's position after sorting; experts own ranges of rows (Smem::row_start, row_end) and of blocks of kBlockTokens
// rows (Smem::block_start).

// Of head_decode or head_prefill.
DEVICE u32 pair_of_row(const Params& p, const Smem& smem, const Head& head, u32 row);
DEVICE u32 use_of_row(const Params& p, u32 row, u32 pair);

// Whether tokens are read from Params::pool in decode: quantised here, fetched from ranks, or of MXFP4 put in the order
// of channel_order.cuh here, where CTAs wait for each other anyway.
DEVICE bool copies_x(const Params& p) {
    return kNumRanks > 1 || quantizes_x(p) || (kHasChunkScales && p.num_tokens * kTopK > kNumLocalPairs);
}

// Bit s is set if slot s of the token holds an expert.
DEVICE u32 used_slots(const Params& p, u32 token) {
    u32 used = 0;
#pragma unroll 8
    for (u32 slot = 0; slot < kTopK; ++slot) {
        u32 expert = expert_of_pair(p, u64(token) * kTopK + slot);
        if constexpr (kTrace) forget_value(expert);  // else a traced decode kernel spills 4 bytes
        used |= u32(expert < kNumExperts) << slot;
    }
    return used;
}

// An expert's last tile takes a few rows more where a tile of its own would read all weights again for them.
DEVICE u32 num_blocks_of(u32 num_rows) {
    if (kTileTokens == kBlockTokens) return ceil_div(num_rows, kBlockTokens);
    return num_rows > kTileTokens ? ceil_div(num_rows - (kTileTokens - kBlockTokens), kBlockTokens) : num_rows > 0;
}

// Turns rows per expert into starts of rows and of blocks. One warp; lane l sums a contiguous part of the experts.
template <typename T>
DEVICE void prefix_sums(Smem& smem, const T* num_rows) {
    constexpr u32 kPart = ceil_div(kNumExperts, kWarpThreads);
    const u32 begin = lane_idx() * kPart, end = min_of(begin + kPart, kNumExperts);
    u32 rows = 0, blocks = 0;
    for (u32 e = begin; e < end; ++e) {
        rows += ceil_div(num_rows[e], kRowAlign) * kRowAlign;
        blocks += num_blocks_of(num_rows[e]);
    }
    u32 row = rows, block = blocks;
#pragma unroll
    for (u32 distance = 1; distance < kWarpThreads; distance *= 2) {
        const u32 r = __shfl_up_sync(kFullMask, row, distance);
        const u32 b = __shfl_up_sync(kFullMask, block, distance);
        row += lane_idx() >= distance ? r : 0;
        block += lane_idx() >= distance ? b : 0;
    }
    row -= rows;
    block -= blocks;
    for (u32 e = begin; e < end; ++e) {
        smem.row_start[e] = row;
        smem.row_end[e] = row + num_rows[e];
        smem.block_start[e] = block;
        row += ceil_div(num_rows[e], kRowAlign) * kRowAlign;
        block += num_blocks_of(num_rows[e]);
    }
    if (lane_idx() == kWarpThreads - 1) {
        smem.row_start[kNumExperts] = row;
        smem.block_start[kNumExperts] = block;
    }
}

DEVICE void count_pairs(const Params& p, u32* counts, u32 begin, u32 end) {
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) counts[e] = 0;
    sync_block();
    for (u32 pair = begin + thread_idx(); pair < end; pair += kNumThreads) {
        const u32 expert = expert_of_pair(p, pair);
        if (expert < kNumExperts) fetch_add_shared(counts + expert, 1);
    }
    sync_block();
}

// Many pairs: every CTA counts those from `begin` to `end`, reserves rows with one atomic an expert, and after a grid
// barrier knows the totals. Leaves in `next` the CTA's first row of each expert. The order of rows inside an expert
// varies from run to run; no result depends on it.
DEVICE void reserve_rows(const Params& p, Smem& smem, const Head& head, u32 begin, u32 end, u32* counts, u32* next) {
    u32* rows_of_expert = counter(p, head, kBankCounts);
    count_pairs(p, counts, begin, end);
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) {
        next[e] = counts[e] ? fetch_add_relaxed_gpu(rows_of_expert + e, counts[e]) : 0;
    }
    sync_block();
    if (warp_idx() == 0 && !sync_grid(p, counter(p, head, kBankBarrier))) abort_head(smem);
    leave_if_aborted(smem);
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) counts[e] = load_relaxed_gpu(rows_of_expert + e);
    sync_block();
    if (warp_idx() == 0) prefix_sums(smem, counts);
    sync_block();
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) next[e] += smem.row_start[e];
    sync_block();
}
