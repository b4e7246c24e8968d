// What lies where between dispatch and combine. A token goes to a rank once: it is token `n` there, and leaves a
// record. Its rows there are one, number n, or with kExpertRows one for each of its experts. Tokens and rows are in the
// order of ranks they come from, and of tokens there: always the same.

// Where a slot of a token went: a rank and n there, and its row.
constexpr u32 kPlaceBits = 26;
constexpr u32 kNoPlace = ~0u;
DEVICE uint2 make_place(u32 rank, u32 n, u32 row) { return make_uint2(rank << kPlaceBits | n, row); }
DEVICE u32 rank_of_place(uint2 place) { return place.x >> kPlaceBits; }
DEVICE u32 token_of_place(uint2 place) { return place.x & ((1u << kPlaceBits) - 1); }

// A lane for each slot of a token: whether the slot is the first on its rank, which stands for the token there.
DEVICE bool is_first_on_rank(uint2 place) {
    const bool used = place.x != kNoPlace;
    const u32 same = __match_any_sync(kFullMask, used ? rank_of_place(place) : kUnused - lane_idx());
    return used && __ffs(same) - 1 == lane_idx();
}
DEVICE uint2 load_place(const uint2* places, u32 token) {
    return lane_idx() < kTopK ? places[u64(token) * kTopK + lane_idx()] : make_uint2(kNoPlace, 0);
}

// Words of a record: its number at its rank, that rank and which of the token's ranks this one is, then of every slot
// the expert here or -1, the router weight, and with kExpertRows the row.
constexpr u32 kRecordToken = 0, kRecordRank = 1, kRecordIds = 2, kRecordWeights = kRecordIds + kTopK,
              kRecordRows = kRecordWeights + kTopK;
constexpr u32 kRecordPartBits = 8;

DEVICE u32* record(const Params& p, u32 rank, u32 n) {
    return symmetric<u32>(p, rank, p.records_at) + u64(n) * kRecordWords;
}
DEVICE u8* row_on(const Params& p, u32 rank, u32 row) {
    return symmetric<u8>(p, rank, p.rows_at) + u64(row) * kRowBytes;
}
DEVICE float* scales_on(const Params& p, u32 rank, u32 row) {
    return symmetric<float>(p, rank, p.row_scales_at) + u64(row) * kNumGroups;
}

// The sum that one of a token's ranks or nodes sends, at the token's rank.
constexpr u32 kRowOutBytes = 2 * kHidden;  // bf16
DEVICE i64 sum_at(const Params& p, u32 token, u32 part) {
    return p.sums_at + (i64(token) * kMaxParts + part) * kRowOutBytes;
}
DEVICE u8* sum_on(const Params& p, u32 rank, u32 token, u32 part) {
    return symmetric<u8>(p, rank, sum_at(p, token, part));
}
