// y = sum of a token's slices in slot order, by whoever delivers the last of them: no phase of its own, no grid-wide
// wait, and the same bits whatever the order of arrival.

DEVICE void combine_token(const Params& p, u32 token, u32 used, u32 tile) {
    const u32 channel = tile * kBlockRows + lane_idx() * 8;
    if (channel >= kHidden) return;
    const u16* slices = p.slices + u64(token) * kTopK * kHidden + channel;
    float sums[8] = {};
#pragma unroll 8
    for (u32 slot = 0; slot < kTopK; ++slot) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (used >> slot & 1) v = *reinterpret_cast<const uint4*>(slices + u64(slot) * kHidden);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sums[2 * i] += bf16_low(words[i]);
            sums[2 * i + 1] += bf16_high(words[i]);
        }
    }
    *reinterpret_cast<uint4*>(p.y + i64(token) * p.y_stride + channel) =
        make_uint4(pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]), pack_bf16(sums[4], sums[5]),
                   pack_bf16(sums[6], sums[7]));
}

// After store_slices. Lanes count deliveries for a token each; then the warp sums the complete ones together.
DEVICE void combine_tokens(const Params& p, const Task& task, const Share& share, const u32* pairs,
                           const u32* used_of_row) {
    if (share.num_tokens == 0) return;
    sync_share(share);
    const u32 warp = kSplitTokens ? share.warp : share.group * 4 + share.warp;
    const u32 i = lane_idx() * share.num_warps + warp;
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
    for (; ready != 0; ready &= ready - 1) {
        const u32 lane = __ffs(ready) - 1;
        combine_token(p, __shfl_sync(kFullMask, token, lane), __shfl_sync(kFullMask, used, lane), task.tile);
    }
}
