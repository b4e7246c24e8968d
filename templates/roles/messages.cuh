// Messages: what goes to a node for a token that has experts there, or lies in this rank's own memory for its own node.
// The row, its scales, and words: the token, then of every slot where it goes, its expert there and router weight.

constexpr u32 kMessageToken = 0, kMessagePlaces = 1, kMessageExperts = kMessagePlaces + 2 * kTopK,
              kMessageWeights = kMessageExperts + kTopK;

DEVICE i64 sent_at(const Params& p, u32 token) { return p.sent_at + i64(token) * kMessageBytes; }

// Of node `from` to a rank on node `to`; none comes from a rank's own node.
DEVICE i64 came_at(const Params& p, u32 from, u32 to, u32 slot) {
    return p.came_at + (i64(from > to ? from - 1 : from) * p.rank_capacity + slot) * kMessageBytes;
}

DEVICE float* message_scales(u8* message) { return reinterpret_cast<float*>(message + kRowBytes); }
DEVICE u32* message_words(u8* message) { return reinterpret_cast<u32*>(message + kMessageWordsAt); }

DEVICE u32 node_of_place(uint2 place) { return rank_of_place(place) / kNodeRanks; }

// A lane for each slot of a token: whether the slot is the first on its node.
DEVICE bool is_first_on_node(uint2 place) {
    const bool used = place.x != kNoPlace;
    const u32 same = __match_any_sync(kFullMask, used ? node_of_place(place) : kUnused - lane_idx());
    return used && __ffs(same) - 1 == lane_idx();
}

// What combine needs of a message: its token, which of the token's nodes this is, and this node's ranks that have it.
// A channel's list ends before its room does with kNoToken.
constexpr u32 kTokenBits = 26, kNoToken = ~0u;
DEVICE u32* list_entry(const Params& p, u32 node, u32 slot) {
    return const_cast<u32*>(p.forwarded) + (u64(node) * p.rank_tokens + slot) * 2;
}
