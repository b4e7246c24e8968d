// Decode: how a tile is finished once it is stored. Fences, atomics and loads take microseconds each beside the stream
// of weights, so warps of their own tell other CTAs of the tile and sum the tokens that it completes.

constexpr u32 kDeliverWarps = kDeliverWarpEnd - kDeliverWarpBegin;

// After store_slices_columns. Lanes count deliveries for a token each; then the warp sums the complete ones together.
DEVICE void combine_tokens(const Params& p, const Task& task, const u32* pairs, const u32* used_of_row) {
    const u32 i = lane_idx() * kDeliverWarps + warp_idx() - kDeliverWarpBegin;
    u32 token = 0, used = 0;
    bool last = false;
    if (i < task.num_rows) {
        token = pairs[i] / kTopK;
        used = used_of_row[i];
        if (!goes_alone(used)) {
            u32* count = p.combine_count + u64(token) * kNumTiles2 + task.tile;
            // Releases this tile's slices and, for the last, acquires all others': pairs with itself in other CTAs.
            last = fetch_add_acq_rel_gpu(count, 1) + 1 == __popc(used);
            if (last) store_relaxed_gpu(count, 0);  // ready for the next launch
        }
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

DEVICE void role_deliver(const Params& p, Smem& smem, const Head& head) {
    Ring<kNumTaskSlots> slot;
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        if (task.phase == kDone) return combine_ranks(p, kDeliverWarpBegin, kDeliverWarps);
        trace_task(p, task);
        // Pairs with finish_tile.
        wait_barrier(p, kWaitTileStored, &smem.stored[slot.stage], slot.stage, slot.parity());
        if (!is_in_parts(task) || smem.is_last_part[slot.stage] != 0) {
            if (task.phase == kGemm2) {
                trace_begin(p, kEventCombine);
                if constexpr (kSumsHere)
                    combine_tokens(p, task, smem.task_rows[slot.stage], smem.task_used[slot.stage]);
                finish_expert_tile(p, smem, head, task.expert, kDeliverWarps);
            } else if (warp_idx() == kDeliverWarpBegin && lane_idx() == 0) {
                // The block's rows of Params::mid are finished by every tile of GEMM 1; pairs with wait_for_mid.
                add_release_gpu(counter(p, head, kBankBlocks + task.block), 1);
            }
        }
        trace_end(p, kEventTask);
        free_task(smem, slot);
    }
}

struct Lists {};  // of prefill

// Every lane, for what it stored; pairs with role_deliver.
DEVICE void finish_tile(const Params&, Smem& smem, const Task&, u32 slot, Lists&) { arrive(&smem.stored[slot]); }

DEVICE void finish_last_tile(const Params&, Smem&, const Lists&) {}
