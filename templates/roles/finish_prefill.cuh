// Prefill: how a tile is finished once it is stored. Fences and atomics with other CTAs take a microsecond each, so a
// warp of their own does them, and lists the tokens that the tile completes. The math warps sum those after their next
// tile of GEMM 2.

constexpr u32 kNumLists = 2;

// Slices of a token that are there, of one tile of GEMM 2.
DEVICE u32* combine_count(const Params& p, u32 token, u32 tile) {
    return p.combine_count + u64(token) * kNumTiles2 + tile;
}

DEVICE void role_deliver(const Params& p, Smem& smem, const Head& head) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumLists> list;
    u32 experts[2] = {};  // of the last tiles of GEMM 2, the newest first
    u32 num_stored = 0;
    const u32 lane = lane_idx(), lanes_before = (1u << lane) - 1;
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        if (task.phase == kDone) break;
        trace_task(p, task);
        // Pairs with finish_tile.
        wait_barrier(p, kWaitTileStored, &smem.stored[slot.stage], slot.stage, slot.parity());
        if (task.phase == kGemm1) {
            // Rows of Params::mid; pairs with wait_for_mid.
            if (lane == 0) add_release_gpu(counter(p, head, kBankBlocks + task.block), 1);
            free_task(smem, slot);
            trace_end(p, kEventTask);
            continue;
        }
        if constexpr (!kSumsHere) {
            finish_expert_tile(p, smem, head, task.expert, 1);
            free_task(smem, slot);
            trace_end(p, kEventTask);
            continue;
        }
        if constexpr (kNumRanks > 1) {
            if (num_stored > 1) finish_expert_tile(p, smem, head, experts[1], 1);
            experts[1] = experts[0];
            experts[0] = task.expert;
            num_stored += 1;
        }
        // The list is free: the warps that stored this tile have summed the list before the last.
        constexpr u32 kLooks = ceil_div(kTileTokens, kWarpThreads);
        u32 tokens[kLooks] = {}, used[kLooks] = {}, before[kLooks] = {};
        // One fence releases the tile's slices for all rows, the other acquires those of other tiles: pairs with itself
        // in other CTAs. Counts are in flight together.
        fence_gpu();
#pragma unroll
        for (u32 i = 0; i < kLooks; ++i) {
            const u32 row = i * kWarpThreads + lane;
            if (row >= task.num_rows) continue;
            tokens[i] = smem.task_rows[slot.stage][row] / kTopK;
            used[i] = smem.task_used[slot.stage][row];
            if (goes_alone(used[i])) used[i] = 0;
            if (used[i] != 0) before[i] = fetch_add_relaxed_gpu(combine_count(p, tokens[i], task.tile), 1);
        }
        fence_gpu();
        u32 size = 0;
#pragma unroll
        for (u32 i = 0; i < kLooks; ++i) {
            const bool last = used[i] != 0 && before[i] + 1 == __popc(used[i]);
            const u32 lasts = __ballot_sync(kFullMask, last);
            if (last) {
                store_relaxed_gpu(combine_count(p, tokens[i], task.tile), 0);  // ready for the next launch
                const u32 at = size + __popc(lasts & lanes_before);
                smem.list_tokens[list.stage][at] = tokens[i];
                smem.list_used[list.stage][at] = used[i];
            }
            size += __popc(lasts);
        }
        if (lane == 0) {
            smem.list_size[list.stage] = size;
            smem.list_tile[list.stage] = task.tile;
        }
        arrive(&smem.list_full[list.stage]);  // every lane, for what it wrote and acquired; pairs with sum_list
        list.advance();
        free_task(smem, slot);
        trace_end(p, kEventTask);
    }
    if constexpr (kNumRanks > 1 && kSumsHere) {
        wait_for_sums(p, smem);
        if (num_stored > 1) finish_expert_tile(p, smem, head, experts[1], 1);
        if (num_stored > 0) finish_expert_tile(p, smem, head, experts[0], 1);
    }
}

// Tiles of GEMM 2 that this warp has stored; the list of the last has not been summed.
struct Lists {
    u32 num_stored = 0;
};

DEVICE void sum_list(const Params& p, Smem& smem, u32 number) {
    const u32 stage = number % kNumLists;
    wait_barrier(p, kWaitListFull, &smem.list_full[stage], stage, number / kNumLists % 2);
    const u32 size = smem.list_size[stage], tile = smem.list_tile[stage];
    for (u32 first = (warp_idx() - kMathWarpBegin) * kCombineTokens; first < size;
         first += kNumMathWarps * kCombineTokens) {
        u32 tokens[kCombineTokens], used[kCombineTokens];
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
            tokens[t] = first + t < size ? smem.list_tokens[stage][first + t] : 0;
            used[t] = first + t < size ? smem.list_used[stage][first + t] : 0;
        }
        sum_slices(p, tokens, used, tile);
    }
}

DEVICE void finish_tile(const Params& p, Smem& smem, const Task& task, u32 slot, Lists& lists) {
    arrive(&smem.stored[slot]);  // every lane, for what it stored; pairs with role_deliver
    if (task.phase == kGemm1 || !kSumsHere) return;
    trace_begin(p, kEventCombine);
    if (lists.num_stored > 0) sum_list(p, smem, lists.num_stored - 1);
    lists.num_stored += 1;
}

DEVICE void finish_last_tile(const Params& p, Smem& smem, const Lists& lists) {
    if (lists.num_stored > 0) sum_list(p, smem, lists.num_stored - 1);
    end_sums(smem);
    combine_ranks(p, kMathWarpBegin, kNumMathWarps);
}
