// The scale-up warps of a hybrid combine: what this rank has of every token goes to the rank of its node that forwarded
// the token. Rows of all ranks in turn, so that all of the node's ranks have work at once.

constexpr u32 kBatchRows = 4;  // between news to another rank (guess; DeepEP V2 has 3)

// Rows of `num` tokens that came from `source`. One whole warp. Pairs with take_ready.
DEVICE void bring_rows(const Params& p, Smem& smem, RowMover& mover, u32 source, u32 first, u32 num) {
    const u32 node = source / kNodeRanks, mate = first_of_domain(p) + source % kNodeRanks;
    const u32* words = p.own_records + u64(first + min_of(lane_idx(), num - 1)) * kRecordWords;
    const u32 token = words[kRecordToken], part = words[kRecordRank] & ((1u << kRecordPartBits) - 1);
    mover.move(p, smem, first, num, [&](u32 i) {
        const u32 of = __shfl_sync(kFullMask, token, i), at = __shfl_sync(kFullMask, part, i);
        return symmetric<u8>(p, mate, node_sum_at(p, node, of, at));
    });
    sync_warp();
    if (lane_idx() < num) or_release_sys(arrived(p, mate, node, token), 1u << (p.rank % kNodeRanks));
}

DEVICE void role_scale_up(const Params& p, Smem& smem, const Head&) {
    u32 most = 0;  // tokens of a rank
    for (u32 rank = lane_idx(); rank < kNumRanks; rank += kWarpThreads) {
        const u32 num = p.source_starts[rank + 1] - p.source_starts[rank];
        most = num > most ? num : most;
    }
#pragma unroll
    for (u32 mask = 1; mask < kWarpThreads; mask *= 2) {
        const u32 other = __shfl_xor_sync(kFullMask, most, mask);
        most = other > most ? other : most;
    }
    const u32 warp = warp_idx() - kScaleUpWarpBegin, num_batches = ceil_div(most, kBatchRows) * kNumRanks;
    RowMover mover{warp};
    fence_async_global();  // behind wait_for_ranks: what the launch before left where rows go has been read
    for (u32 i = warp * num_blocks() + block_idx(); i < num_batches; i += kBlockChannels * num_blocks()) {
        const u32 source = (i + p.rank) % kNumRanks, end = p.source_starts[source + 1];
        const u32 first = p.source_starts[source] + i / kNumRanks * kBatchRows;
        if (first < end) bring_rows(p, smem, mover, source, first, min_of(end - first, kBatchRows));
    }
}
