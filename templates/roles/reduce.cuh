// The reduce warps of a combine inside one domain: what has been brought for this rank's tokens becomes y. Few tokens
// are shared out in pieces.

DEVICE u64 ranks_of_token(const Params& p, u32 token) {
    u64 ranks = 0;
    for (u32 slot = 0; slot < kTopK; ++slot) {
        const uint2 place = p.places[u64(token) * kTopK + slot];
        if (place.x != kNoPlace) ranks |= u64(1) << rank_of_place(place);
    }
    return ranks;
}

DEVICE void role_reduce(const Params& p, Smem& smem, const Head&) {
    Summer summer{warp_idx() - kReduceWarpBegin};
    const u32 num_warps = kNumReduceWarps * num_blocks();
    const u32 warp = (warp_idx() - kReduceWarpBegin) * num_blocks() + block_idx();
    const u32 warps_of_token = min_of(max_of(num_warps / max_of(p.num_tokens, 1u), 1u), kPieces);
    const u32 share = ceil_div(p.num_tokens * warps_of_token, num_warps);
    const u32 begin = warp * share, end = min_of(begin + share, p.num_tokens * warps_of_token);
    for (u32 first = begin; first < end; first += kWarpThreads) {
        const u32 own = min_of(first + lane_idx(), end - 1) / warps_of_token;
        const u64 ranks = ranks_of_token(p, own);
        const u32 num_parts = __popc(u32(ranks)) + __popc(u32(ranks >> 32));
        const auto add = [&](u32 lane) {
            const u32 token = (first + lane) / warps_of_token, turn = (first + lane) % warps_of_token;
            add_up(p, smem, summer, token, __shfl_sync(kFullMask, num_parts, lane), turn, warps_of_token);
        };
        const bool waits = first + lane_idx() < end;
        for_each_arrived(p, kWaitSums, waits, ranks, arrival(p, p.rank, own), warps_of_token, add);
    }
}
