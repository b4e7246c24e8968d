// The forward warps of a hybrid combine: a channel each, of all nodes. A token's rows on this node become one and go
// home; then what has come home for this rank's own tokens is added up.

// Adds up the rows of a token, to where it goes from. One whole warp.
DEVICE void sum_node(const Params& p, Smem& smem, Summer& summer, u32 node, u32 token, u32 part, u32 num_rows) {
    const u32 source = rail_rank(p, node);
    u8* first = symmetric<u8>(p, p.rank, taken_at(p, source, token, 0));
    u8* sum = node == own_node(p) ? sum_on(p, p.rank, token, part) : first;
    const u8* row = first + min_of(lane_idx(), kMaxNodeParts - 1) * kRowOutBytes;
    const auto store = [&](const Piece& piece) { piece.store(sum); };
    summer.add_rows(p, smem, first_rows(num_rows), row, 1.0f, store);
}

// Up to 32 tokens of a channel's list from `first` on, as their rows come; a lane has one. Whether the list goes on.
DEVICE bool take_listed(const Params& p, Smem& smem, Summer& summer, u32 node, u32 first, u32 end) {
    const u32 slot = first + lane_idx(), source = rail_rank(p, node);
    const u32* entry = list_entry(p, node, min_of(slot, end - 1));
    const bool is_token = slot < end && entry[0] != kNoToken;
    const u32 ended = __ballot_sync(kFullMask, !is_token);  // and what is behind the first is no list
    const bool is_listed = is_token && (ended & ((1u << lane_idx()) - 1)) == 0;
    const u32 token = entry[0] & ((1u << kTokenBits) - 1), part = entry[0] >> kTokenBits, mates = entry[1];
    const auto send = [&](u32 lane) {
        const u32 of = __shfl_sync(kFullMask, token, lane), at = __shfl_sync(kFullMask, part, lane);
        sum_node(p, smem, summer, node, of, at, __popc(__shfl_sync(kFullMask, mates, lane)));
        if (node != own_node(p)) put(p, node, sum_at(p, of, at), taken_at(p, source, of, 0), kRowOutBytes);
    };
    const bool waits = is_listed && mates != 0;
    for_each_arrived(p, waits, mates, arrived_of(p, source, is_listed ? token : 0), send);
    return ended == 0;
}

// Until all nodes' sums of a channel of this rank's own tokens are here. One whole warp.
DEVICE void wait_for_sums(const Params& p, u32 channel) {
    const u32 lane = lane_idx();
    u32 owing = p.rank;
    wait_until<true>(p, kWaitHome, owing, launch_number() + 1, [&] {
        const bool comes = lane < kNumNodes && load_acquire_sys(tail(p, lane, channel)) == 0;
        const u32 coming = __ballot_sync(kFullMask, comes);
        if (coming != 0) owing = rail_rank(p, __ffs(coming) - 1);
        return coming == 0;
    });
    sync_warp();
    fence_async_global();
    if (lane < kNumNodes) store_relaxed_sys(tail(p, lane, channel), 0);
}

DEVICE void role_forward_sums(const Params& p, Smem& smem, const Head&) {
    Summer summer{warp_idx() - kForwardSumsWarpBegin};
    const u32 begin = block_idx() * kBlockChannels + warp_idx() - kForwardSumsWarpBegin;
    const u32 step = num_blocks() * kBlockChannels, channels = num_channels(p);
    for (u32 node = 0; node < kNumNodes; ++node) {
        const u32 rank = rail_rank(p, node);
        const auto entered = [&] { return __ballot_sync(kFullMask, !rail_entered(p, node)) == 0; };
        if (node != own_node(p)) wait_until<true>(p, kWaitRail, rank, launch_number() + 1, entered);
    }
    for (u32 channel = begin; channel < channels; channel += step) {
        const u32 first = channel * p.channel_tokens, end = min_of(first + p.channel_tokens, p.rank_tokens);
        for (u32 i = 1; i <= kNumNodes; ++i) {
            const u32 node = (own_node(p) + i) % kNumNodes;  // the own one last: others wait for the rail
            for (u32 slot = first; slot < end && take_listed(p, smem, summer, node, slot, end); slot += kWarpThreads)
                continue;
            fence_async_global();  // pairs with wait_for_sums
            add_tail(p, node, channel, 1);
        }
    }
    flush(p);
    for (u32 channel = begin; channel < channels; channel += step) {
        wait_for_sums(p, channel);
        const Chunk chunk = chunk_of_channels(p, channel, 1);
        for (u32 token = chunk.begin; token < chunk.end; ++token) {
            const u32 nodes = __ballot_sync(kFullMask, is_first_on_node(load_place(p.places, token)));
            const u8* row = sum_on(p, p.rank, token, min_of(lane_idx(), kMaxParts - 1));
            const auto store = [&](Piece& piece) { piece.store_y(p, token); };
            summer.add_rows(p, smem, first_rows(__popc(nodes)), row, 1.0f, store);
        }
    }
}
