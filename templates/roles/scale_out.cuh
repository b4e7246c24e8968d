// The scale-out warps: a channel each. A token becomes a message in this rank's memory, once, and goes along the rail
// to every node that it has experts on; on its own node the forward warps read it where it is.

constexpr u32 kTailMessages = 6;  // between news of a channel's tail (guess; DeepEP V2 has as many)

// The message beside its row. One whole warp; a lane has a slot.
DEVICE void write_message(const Params& p, Smem& smem, u32 warp, u32 token, uint2 place, u8* message) {
    for (u32 group = lane_idx(); group < kNumGroups; group += kWarpThreads) {
        message_scales(message)[group] = scale_of_row(p, smem, warp, token, group);
    }
    u32* words = message_words(message);
    if (lane_idx() == 0) words[kMessageToken] = token;
    if (lane_idx() >= kTopK) return;
    words[kMessagePlaces + 2 * lane_idx()] = place.x;
    words[kMessagePlaces + 2 * lane_idx() + 1] = place.y;
    if (p.is_cached) return;
    const Sent sent = sent_from_here(p, token, place);
    words[kMessageExperts + lane_idx()] = sent.expert;
    words[kMessageWeights + lane_idx()] = sent.weight;
}

// Messages, of which lane n has the number to node n, and the number at the last time; and whether that is all. The
// rail may bring such news in any order.
DEVICE void tell_tails(const Params& p, u32 channel, u32 num_sent, u32 num_told, bool is_end) {
    fence_async_global();  // pairs with forward_message
    for (u32 node = 0; node < kNumNodes; ++node) {
        const u32 num_new = __shfl_sync(kFullMask, num_sent - num_told, node);
        const u64 end = is_end ? __shfl_sync(kFullMask, num_sent, node) + 1 : 0;
        if (num_new != 0 || is_end) add_tail(p, node, channel, num_new | end << kEndShift);
    }
}

DEVICE void role_scale_out(const Params& p, Smem& smem, const Head&) {
    const u32 warp = warp_idx() - kScaleOutWarpBegin, channel = block_idx() * kBlockChannels + warp;
    if (channel >= num_channels(p)) return;
    const Chunk chunk = chunk_of_channels(p, channel, 1);
    const u32 lane = lane_idx(), first_slot = channel * p.channel_tokens;
    RowRing ring;
    if (chunk.begin < chunk.end) load_row(p, smem, warp, chunk.begin, ring);
    wait_for_places(smem);
    u32 num_sent = 0, num_told = 0;  // lane n: messages to node n
    for (u32 token = chunk.begin; token < chunk.end; ++token) {
        wait_for_row(p, smem, warp, token, ring);
        const uint2 place = load_place(p.places, token);
        u8* message = symmetric<u8>(p, p.rank, sent_at(p, token));
        if (lane == 0) store_bulk(message, row_buffer(smem, warp, ring), kRowBytes);
        commit_stores();
        write_message(p, smem, warp, token, place, message);
        wait_for_stores<0>();
        sync_warp();
        ring.advance();
        if (token + 1 < chunk.end) load_row(p, smem, warp, token + 1, ring);
        u32 nodes = 1u << own_node(p);  // whose forward warps count all messages
        for (u32 node = 0; node < kNumNodes; ++node) {
            const bool goes = place.x != kNoPlace && node_of_place(place) == node;
            if (node == own_node(p) || __ballot_sync(kFullMask, goes) == 0) continue;
            const u32 slot = first_slot + __shfl_sync(kFullMask, num_sent, node);
            put(p, node, came_at(p, own_node(p), node, slot), sent_at(p, token), kMessageBytes);
            nodes |= 1u << node;
        }
        num_sent += nodes >> lane & 1;
        if ((token - chunk.begin + 1) % kTailMessages != 0) continue;
        tell_tails(p, channel, num_sent, num_told, false);
        num_told = num_sent;
    }
    tell_tails(p, channel, num_sent, num_told, true);
    flush(p);
}
