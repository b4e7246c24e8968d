// The sum of a token's rows here, by whoever delivers the last of them: no phase of its own, no grid-wide wait, and the
// same bits whatever the order of arrival.

// Not where every row goes to its token's rank.
constexpr bool kSumsHere = kNumRanks == 1 || kPresum;

// Of every token that has any slot in `used`.
DEVICE void sum_slices(const Params& p, const u32 (&tokens)[kCombineTokens], const u32 (&used)[kCombineTokens],
                       u32 tile) {
    const u32 channel = tile * kBlockRows + lane_idx() * 8;
    sum_rows(p.slices, tokens, used, tile, [&](u32 t, uint4 sum) {
        if (used[t] != 0) *reinterpret_cast<uint4*>(sum_target(p, tokens[t], used[t]) + channel) = sum;
    });
}
