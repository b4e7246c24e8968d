// The forward warps of a hybrid combine: a channel each, of all nodes. A token's rows on this node become one and go
// home; then what has come home for this rank's own tokens is added up.

// Adds up the rows of a token, to where it goes from. One whole warp.
DEVICE void sum_node(const Params& p, u32 node, u32 token, u32 part, u32 num_rows) {
    u8* sum =
        node == own_node(p) ? sum_on(p, p.rank, token, part) : symmetric<u8>(p, p.rank, node_sum_at(p, node, token, 0));
    for (u32 at = 0; at < kRowOutBytes; at += kPieceBytes) {
        Piece piece{at + lane_idx() * 16};
        add_rows(
            piece, num_rows == 32 ? kFullMask : (1u << num_rows) - 1,
            [&](u32 row) { return symmetric<u8>(p, p.rank, node_sum_at(p, node, token, row)); },
            [](u32) { return 1.0f; });
        piece.store(sum);
    }
}

// Up to 32 tokens of a channel's list from `first` on, as their rows come; a lane has one. Whether the list goes on.
DEVICE bool take_ready(const Params& p, u32 node, u32 first, u32 end) {
    const u32 slot = first + lane_idx();
    const u32* entry = list_entry(p, node, min_of(slot, end - 1));
    const bool is_token = slot < end && entry[0] != kNoToken;
    const u32 ended = __ballot_sync(kFullMask, !is_token);  // and what is behind the first is no list
    const bool is_listed = is_token && (ended & ((1u << lane_idx()) - 1)) == 0;
    const u32 token = entry[0] & ((1u << kTokenBits) - 1), part = entry[0] >> kTokenBits, mates = entry[1];
    u32* word = arrived(p, p.rank, node, is_listed ? token : 0);
    bool waits = is_listed && mates != 0;
    while (__ballot_sync(kFullMask, waits) != 0) {
        u32 ready = 0, owing = p.rank;
        wait_until<true>(p, kWaitMates, owing, launch_number() + 1, [&] {
            const u32 missing = waits ? mates & ~load_acquire_sys(word) : 0;
            ready = __ballot_sync(kFullMask, waits && missing == 0);
            const u32 late = __ballot_sync(kFullMask, missing != 0);
            if (late != 0) owing = first_of_domain(p) + __ffs(__shfl_sync(kFullMask, missing, __ffs(late) - 1)) - 1;
            return ready != 0;
        });
        sync_warp();
        if (ready >> lane_idx() & 1) store_relaxed_sys(word, 0);
        waits = waits && (ready >> lane_idx() & 1) == 0;
        for (u32 left = ready; left != 0; left &= left - 1) {
            const u32 lane = __ffs(left) - 1, of = __shfl_sync(kFullMask, token, lane);
            const u32 at = __shfl_sync(kFullMask, part, lane);
            sum_node(p, node, of, at, __popc(__shfl_sync(kFullMask, mates, lane)));
            if (node != own_node(p)) put(p, node, sum_at(p, of, at), node_sum_at(p, node, of, 0), kRowOutBytes);
        }
    }
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
    if (lane < kNumNodes) store_relaxed_sys(tail(p, lane, channel), 0);
}

DEVICE void role_forward_sums(const Params& p, Smem&, const Head&) {
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
            for (u32 slot = first; slot < end && take_ready(p, node, slot, end); slot += kWarpThreads) continue;
            add_tail(p, node, channel, 1);
        }
    }
    flush(p);
    for (u32 channel = begin; channel < channels; channel += step) {
        wait_for_sums(p, channel);
        const Chunk chunk = chunk_of_channels(p, channel, 1);
        for (u32 token = chunk.begin; token < chunk.end; ++token) {
            const u32 nodes = __ballot_sync(kFullMask, is_first_on_node(load_place(p.places, token)));
            for (u32 at = 0; at < kRowOutBytes; at += kPieceBytes) {
                add_up(p, token, __popc(nodes), Piece{at + lane_idx() * 16});
            }
        }
    }
}
