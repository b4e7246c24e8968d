// What both buckets' combines share.

// Counts a tile's delivery for one token; true for the last. It releases this CTA's slices and, for the last, acquires all
// others': pairs with itself in other CTAs. The counter is left ready for the next launch.
DEVICE bool count_delivery(const Params& p, const Task& task, u32 token, u32 used) {
    u32* count = p.combine_count + u64(token) * kNumTiles2 + task.tile;
    const bool last = fetch_add_acq_rel_gpu(count, 1) + 1 == __popc(used);
    if (last) store_relaxed_gpu(count, 0);
    return last;
}

DEVICE void add_slice(float (&sums)[8], const uint4& v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        sums[2 * i] += bf16_low(words[i]);
        sums[2 * i + 1] += bf16_high(words[i]);
    }
}

DEVICE void store_sums(const Params& p, u32 token, u32 channel, const float (&sums)[8]) {
    *reinterpret_cast<uint4*>(p.y + i64(token) * p.y_stride + channel) =
        make_uint4(pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]), pack_bf16(sums[4], sums[5]),
                   pack_bf16(sums[6], sums[7]));
}
