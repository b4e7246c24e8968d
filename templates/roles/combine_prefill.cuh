// Prefill: y = sum of a token's slices in slot order, by the combine warp of the CTA that delivers the last of them, under
// the GEMMs of the next task: no phase of its own, no grid-wide wait, and the same bits whatever the order of arrival.

constexpr u32 kMathConsumers = 1;  // arrivals at a task slot on behalf of the math warps: the combine warp's
constexpr u32 kSliceBytes = kBlockRows * 2;

DEVICE void init_combine_barriers(Smem& smem) {
    for (u32 i = 0; i < kNumTaskSlots; ++i) init_barrier(&smem.math_done[i], kNumMathWarps);  // a lane of each math warp
    for (u32 i = 0; i < kNumCombineBuffers; ++i) init_barrier(&smem.combine_full[i], 1);      // lane 0 of fetch_slices
}

// The math warps only say that their slices are written.
DEVICE void deliver_slices(const Params&, const Smem&, const Task&, const Share&, u32) {
    fence_async_global();  // role_combine of some CTA reads them by bulk copies
}

// One lane of a math warp that has read the task for the last time. Pairs with role_combine.
DEVICE void finish_task(Smem& smem, const Ring<kNumTaskSlots>& slot) { arrive(&smem.math_done[slot.stage]); }

// Fetches of whole tokens, one lane a slice.
DEVICE void fetch_slices(const Params& p, Smem& smem, u32 buffer, u32 token, u32 used, u32 tile) {
    const u32 channels = min_of(kBlockRows, kHidden - tile * kBlockRows);
    u64* full = &smem.combine_full[buffer];
    const u32 slot = lane_idx();
    if (slot == 0) arrive_expect_bytes(full, __popc(used) * channels * 2);
    sync_warp();
    if (used >> slot & 1) {
        const u16* slice = p.slices + (u64(token) * kTopK + slot) * kHidden + tile * kBlockRows;
        load_bulk(smem.combine_slices[buffer][slot], slice, channels * 2, full);
    }
}

DEVICE void sum_slices(const Params& p, const Smem& smem, u32 buffer, u32 token, u32 used, u32 tile) {
    const u32 channel = tile * kBlockRows + lane_idx() * 8;
    if (channel >= kHidden) return;
    float sums[8] = {};
#pragma unroll 4
    for (u32 slot = 0; slot < kTopK; ++slot) {
        if (!(used >> slot & 1)) continue;
        const uint4 v = *reinterpret_cast<const uint4*>(smem.combine_slices[buffer][slot] + lane_idx() * 16);
        add_slice(sums, v);
    }
    store_sums(p, token, channel, sums);
}

DEVICE void role_combine(const Params& p, Smem& smem, const Head&) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumCombineBuffers> fetched, summed;
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        if (task.phase == kDone) return;
        wait_barrier(p, kWaitMathDone, &smem.math_done[slot.stage], slot.stage, slot.parity());  // pairs with finish_task
        const u32 num_rows = task.phase == kGemm2 ? task.num_rows : 0;
        for (u32 first = 0; first < num_rows; first += kWarpThreads) {
            const u32 i = first + lane_idx();
            u32 token = 0, used = 0;
            bool last = false;
            if (i < num_rows) {
                token = smem.task_rows[slot.stage][i] / kTopK;
                used = smem.task_used[slot.stage][i];
                last = count_delivery(p, task, token, used);
            }
            const u32 ready = __ballot_sync(kFullMask, last);
            fence_async_global();  // the bulk copies come after what count_delivery acquired
            u32 to_fetch = ready, ahead = 0;
            for (u32 to_sum = ready; to_sum != 0; to_sum &= to_sum - 1) {
                for (; to_fetch != 0 && ahead < kNumCombineBuffers; to_fetch &= to_fetch - 1, ++ahead) {
                    const u32 lane = __ffs(to_fetch) - 1;
                    fetch_slices(p, smem, fetched.stage, __shfl_sync(kFullMask, token, lane),
                                 __shfl_sync(kFullMask, used, lane), task.tile);
                    fetched.advance();
                }
                wait_barrier(p, kWaitSlices, &smem.combine_full[summed.stage], summed.stage, summed.parity());
                const u32 lane = __ffs(to_sum) - 1;
                sum_slices(p, smem, summed.stage, __shfl_sync(kFullMask, token, lane),
                           __shfl_sync(kFullMask, used, lane), task.tile);
                fence_async_shared();  // the buffer is read before it is copied into again
                sync_warp();
                summed.advance();
                --ahead;
            }
        }
        sync_warp();
        if (lane_idx() == 0) free_task(smem, slot);
    }
}
