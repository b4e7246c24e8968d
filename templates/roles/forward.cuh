// The forward warps: a channel of every node each. Messages that come along the rail, and those of this rank itself, go
// to the ranks of this node: rows through shared memory to all their places.

// What combine needs to know of a message. One whole warp; a lane has a slot.
DEVICE void note_forwarded(const Params& p, u32 node, u32 slot, u32 token, uint2 place, uint2 here, u32 firsts) {
    const u32 nodes = __ballot_sync(kFullMask, is_first_on_node(place));
    const u32 first_here = __ffs(__ballot_sync(kFullMask, here.x != kNoPlace)) - 1;
    u32 mates = 0;
    for (u32 left = firsts; left != 0; left &= left - 1) {
        mates |= 1u << __shfl_sync(kFullMask, rank_of_place(here) % kNodeRanks, __ffs(left) - 1);
    }
    if (lane_idx() != 0) return;
    u32* entry = list_entry(p, node, slot);
    entry[0] = token | (firsts == 0 ? 0 : __popc(nodes & ((1u << first_here) - 1))) << kTokenBits;
    entry[1] = mates;
}

// One whole warp, which has acquired the message. Nothing where this node has no part in it.
DEVICE void forward_message(const Params& p, Smem& smem, u32 warp, RowRing& ring, u32 node, u32 slot) {
    const u32 lane = lane_idx();
    const bool is_own = node == own_node(p);
    u8* message = symmetric<u8>(p, p.rank, is_own ? sent_at(p, slot) : came_at(p, node, own_node(p), slot));
    const u32* words = message_words(message);
    const bool is_slot = lane < kTopK;
    const uint2 place = is_slot ? make_uint2(words[kMessagePlaces + 2 * lane], words[kMessagePlaces + 2 * lane + 1])
                                : make_uint2(kNoPlace, 0);
    const bool is_here = place.x != kNoPlace && node_of_place(place) == own_node(p);
    const uint2 here = is_here ? place : make_uint2(kNoPlace, 0);
    const bool is_first = is_first_on_rank(here);
    const u32 firsts = __ballot_sync(kFullMask, is_first), token = words[kMessageToken];
    if (!p.is_cached) note_forwarded(p, node, slot, token, place, here, firsts);
    if (firsts == 0) return;
    wait_for_stores_read<0>();
    sync_warp();
    u64* landed = &smem.landed[warp][ring.stage];
    if (lane == 0) {
        arrive_expect_bytes(landed, kRowBytes);
        load_bulk(row_buffer(smem, warp, ring), message, kRowBytes, landed);
    }
    const bool stores = kExpertRows ? is_here : is_first;
    if constexpr (kNumGroups > 0) {
        store_row_scales(p, here, __ballot_sync(kFullMask, stores),
                         [&](u32 group) { return message_scales(message)[group]; });
    }
    if (!p.is_cached) {
        const u32 expert = is_here ? words[kMessageExperts + lane] : kUnused;
        const u32 weight = is_here ? words[kMessageWeights + lane] : 0;
        store_records(p, {token, rail_rank(p, node), here, expert, weight}, firsts);
    }
    wait_barrier(p, kWaitLanded, landed, warp, ring.parity());
    if (stores) store_bulk(row_on(p, rank_of_place(here), here.y), row_buffer(smem, warp, ring), kRowBytes);
    commit_stores();
    ring.advance();
}

DEVICE void role_forward(const Params& p, Smem& smem, const Head&) {
    const u32 in_block = warp_idx() - kForwardWarpBegin, channel = block_idx() * kBlockChannels + in_block;
    if (channel >= num_channels(p)) return;
    const u32 warp = kBlockChannels + in_block, lane = lane_idx(), first_slot = channel * p.channel_tokens;
    RowRing ring;
    wait_for_places(smem);  // no message comes before; whoever is lost by then, the notify warps have named
    u64 seen = 0;           // lane n: the tail of node n
    u32 taken = 0;          // and how many of its messages went on
    bool open = lane < kNumNodes;
    for (u32 node = own_node(p);;) {
        u32 ready = 0, left = 0, owing = p.rank;
        const auto poll = [&] {
            if (open) seen = load_acquire_sys(tail(p, lane, channel));
            ready = __ballot_sync(kFullMask, open && u32(seen) > taken);
            left = __ballot_sync(kFullMask, open && seen >> kEndShift == 0);
            if (left != 0) owing = rail_rank(p, __ffs(left) - 1);
            return ready != 0 || left == 0;
        };
        wait_until<true>(p, kWaitMessages, owing, launch_number() + 1, poll);
        if (ready == 0) break;
        const u32 after = ready & ~((2u << node) - 1);
        node = __ffs(after != 0 ? after : ready) - 1;  // in turn
        const u32 begin = __shfl_sync(kFullMask, taken, node);
        const u32 num = min_of(u32(__shfl_sync(kFullMask, u32(seen), node)) - begin, kTailMessages);
        sync_warp();
        fence_async_global();
        for (u32 i = begin; i < begin + num; ++i) forward_message(p, smem, warp, ring, node, first_slot + i);
        taken += lane == node ? num : 0;
    }
    if (open) {
        store_relaxed_sys(tail(p, lane, channel), 0);
        const bool has_room = first_slot + taken < min_of(first_slot + p.channel_tokens, p.rank_tokens);
        if (!p.is_cached && has_room) *list_entry(p, lane, first_slot + taken) = kNoToken;
    }
    wait_for_stores<0>();
}
