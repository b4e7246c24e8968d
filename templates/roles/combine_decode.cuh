// Decode: y = sum of a token's slices in slot order, by the warp that delivers the last of them: no phase of its own, no
// grid-wide wait, and the same bits whatever the order of arrival.

constexpr u32 kMathConsumers = kNumMathWarps;  // arrivals of the math warps at a task slot

DEVICE void init_combine_barriers(Smem&) {}

DEVICE void combine_token(const Params& p, u32 token, u32 used, u32 tile) {
    const u32 channel = tile * kBlockRows + lane_idx() * 8;
    if (channel >= kHidden) return;
    const u16* slices = p.slices + u64(token) * kTopK * kHidden + channel;
    float sums[8] = {};
#pragma unroll 8
    for (u32 slot = 0; slot < kTopK; ++slot) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (used >> slot & 1) v = *reinterpret_cast<const uint4*>(slices + u64(slot) * kHidden);
        add_slice(sums, v);
    }
    store_sums(p, token, channel, sums);
}

// After store_slices. Lanes count deliveries for a token each; then the warp sums the complete ones together.
DEVICE void deliver_slices(const Params& p, const Smem& smem, const Task& task, const Share& share, u32 slot) {
    sync_share(share);
    const u32 i = lane_idx() * share.num_warps + share.group * 4 + share.warp;
    u32 token = 0, used = 0;
    bool last = false;
    if (i < share.num_tokens) {
        token = smem.task_rows[slot][i] / kTopK;
        used = smem.task_used[slot][i];
        last = count_delivery(p, task, token, used);
    }
    for (u32 ready = __ballot_sync(kFullMask, last); ready != 0; ready &= ready - 1) {
        const u32 lane = __ffs(ready) - 1;
        combine_token(p, __shfl_sync(kFullMask, token, lane), __shfl_sync(kFullMask, used, lane), task.tile);
    }
}

// One lane of a math warp that has read the task for the last time.
DEVICE void finish_task(Smem& smem, const Ring<kNumTaskSlots>& slot) { free_task(smem, slot); }
