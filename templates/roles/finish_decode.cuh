// Decode: how a tile is finished once it is stored. The math warps tell the others themselves, and sum the tokens that
// it completes.

// A block's rows of Params::mid are finished by every tile of GEMM 1.
DEVICE void publish_mid(const Params& p, const Head& head, const Task& task, const Share& share) {
    sync_math();
    const bool is_leader = share.group == 0 && share.warp == 0 && lane_idx() == 0;
    if (is_leader) add_release_gpu(counter(p, head, kBankBlocks + task.block), 1);  // pairs with wait_for_mid
}

// After store_slices_columns. Lanes count deliveries for a token each; then the warp sums the complete ones together.
DEVICE void combine_tokens(const Params& p, const Task& task, const Share& share, const u32* pairs,
                           const u32* used_of_row) {
    sync_math();
    const u32 i = lane_idx() * kNumMathWarps + share.group * 4 + share.warp;
    u32 token = 0, used = 0;
    bool last = false;
    if (i < share.num_tokens) {
        token = pairs[i] / kTopK;
        used = used_of_row[i];
        u32* count = p.combine_count + u64(token) * kNumTiles2 + task.tile;
        // Releases this tile's slices and, for the last, acquires all others': pairs with itself in other CTAs.
        last = fetch_add_acq_rel_gpu(count, 1) + 1 == __popc(used);
        if (last) store_relaxed_gpu(count, 0);  // ready for the next launch
    }
    u32 ready = __ballot_sync(kFullMask, last);
    if (ready != 0) sync_warp();  // what the last have acquired is ordered before every lane's loads
    while (ready != 0) {
        u32 tokens[kCombineTokens], slots[kCombineTokens];
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
            const u32 lane = ready != 0 ? __ffs(ready) - 1 : 0;
            tokens[t] = __shfl_sync(kFullMask, token, lane);
            slots[t] = __shfl_sync(kFullMask, used, lane);
            if (ready == 0) slots[t] = 0;
            ready &= ready - 1;
        }
        sum_slices(p, tokens, slots, task.tile);
    }
}

struct Lists {};  // of prefill

DEVICE void finish_tile(const Params& p, Smem& smem, const Head& head, const Task& task, const Share& share, u32 slot,
                        Lists&) {
    if (task.phase == kGemm1) {
        publish_mid(p, head, task, share);
    } else {
        trace_begin(p, kEventCombine);
        combine_tokens(p, task, share, smem.task_rows[slot], smem.task_used[slot]);
        trace_end(p, kEventCombine);
    }
}

DEVICE void finish_last_tile(const Params&, Smem&, const Lists&) {}
