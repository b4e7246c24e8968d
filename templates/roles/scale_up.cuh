// The scale-up warps of a hybrid combine: what this rank has of every token goes to the rank of its node that forwarded
// the token.

constexpr u32 kBatchRows = 4;  // between news to another rank (guess; DeepEP V2 has 3)

// Rows of `num` tokens that came from `source`. One whole warp. Pairs with for_each_arrived.
DEVICE void bring_rows(const Params& p, Smem& smem, RowMover& mover, u32 source, u32 first, u32 num) {
    const u32* words = p.own_records + u64(first + min_of(lane_idx(), num - 1)) * kRecordWords;
    const u32 token = words[kRecordToken], part = words[kRecordRank] & ((1u << kRecordPartBits) - 1);
    mover.move(p, smem, first, num, [&](u32 i) {
        const u32 of = __shfl_sync(kFullMask, token, i), at = __shfl_sync(kFullMask, part, i);
        return symmetric<u8>(p, taker_of(p, source), taken_at(p, source, of, at));
    });
    fence_async_global();
    sync_warp();
    if (lane_idx() < num) or_release_sys(arrived_of(p, source, token), 1u << (p.rank - first_of_domain(p)));
}

// Most tokens that came from a rank.
DEVICE u32 most_of_a_rank(const Params& p) {
    u32 most = 0;
    for (u32 rank = lane_idx(); rank < kNumRanks; rank += kWarpThreads) {
        const u32 num = p.source_starts[rank + 1] - p.source_starts[rank];
        most = num > most ? num : most;
    }
#pragma unroll
    for (u32 mask = 1; mask < kWarpThreads; mask *= 2) {
        const u32 other = __shfl_xor_sync(kFullMask, most, mask);
        most = other > most ? other : most;
    }
    return most;
}

// Batches of all ranks in turn, and of a rank's tokens one from each of many places in turn: so all warps everywhere
// that add up have rows soon.
DEVICE void role_scale_up(const Params& p, Smem& smem, const Head&) {
    const u32 warp = warp_idx() - kScaleUpWarpBegin, num_warps = kBlockChannels * num_blocks();
    const u32 of_place = ceil_div(ceil_div(most_of_a_rank(p), kBatchRows), num_warps);
    RowMover mover{warp};
    fence_async_global();  // who takes rows has read those of the launch before
    for (u32 i = warp * num_blocks() + block_idx(); i < of_place * num_warps * kNumRanks; i += num_warps) {
        const u32 source = (i + p.rank) % kNumRanks, turn = i / kNumRanks;
        const u32 batch = turn % num_warps * of_place + turn / num_warps;
        const u32 first = p.source_starts[source] + batch * kBatchRows, end = p.source_starts[source + 1];
        if (first < end) bring_rows(p, smem, mover, source, first, min_of(end - first, kBatchRows));
    }
}
