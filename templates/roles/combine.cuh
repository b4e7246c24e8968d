// y = sum of a token's slices in slot order, by whoever delivers the last of them: no phase of its own, no grid-wide
// wait, and the same bits whatever the order of arrival.

// Not where every row goes to its token's rank.
constexpr bool kSumsHere = kNumRanks == 1 || kPresum;

// Tokens summed at a time: the loads of their slices are in flight together.
constexpr u32 kCombineTokens = kSplitTokens ? 4 : 2;

// Lane l sums 8 channels of every token's rows, those of the slots in `used`; `store(t, sum)` puts them where they
// belong.
template <typename Store>
DEVICE void sum_rows(const u16* first_row, const u32 (&tokens)[kCombineTokens], const u32 (&used)[kCombineTokens],
                     u32 tile, Store store) {
    constexpr u32 kSlots = min_of(kTopK, 8u);  // loaded at a time
    const u32 channel = tile * kBlockRows + lane_idx() * 8;
    if (channel >= kHidden) return;
    float sums[kCombineTokens][8] = {};
#pragma unroll 1
    for (u32 first = 0; first < kTopK; first += kSlots) {
        uint4 slices[kCombineTokens][kSlots] = {};
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
            const u16* rows = first_row + (u64(tokens[t]) * kTopK + first) * kHidden + channel;
#pragma unroll
            for (u32 i = 0; i < kSlots; ++i) {
                if (used[t] >> (first + i) & 1) {
                    slices[t][i] = *reinterpret_cast<const uint4*>(rows + u64(i) * kHidden);
                }
            }
        }
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
#pragma unroll
            for (u32 i = 0; i < kSlots; ++i) {
                const u32 words[4] = {slices[t][i].x, slices[t][i].y, slices[t][i].z, slices[t][i].w};
#pragma unroll
                for (u32 w = 0; w < 4; ++w) {
                    sums[t][2 * w] += bf16_low(words[w]);
                    sums[t][2 * w + 1] += bf16_high(words[w]);
                }
            }
        }
    }
#pragma unroll
    for (u32 t = 0; t < kCombineTokens; ++t) {
        store(t, make_uint4(pack_bf16(sums[t][0], sums[t][1]), pack_bf16(sums[t][2], sums[t][3]),
                            pack_bf16(sums[t][4], sums[t][5]), pack_bf16(sums[t][6], sums[t][7])));
    }
}

// Of every token that has any slot in `used`.
DEVICE void sum_slices(const Params& p, const u32 (&tokens)[kCombineTokens], const u32 (&used)[kCombineTokens],
                       u32 tile) {
    const u32 channel = tile * kBlockRows + lane_idx() * 8;
    sum_rows(p.slices, tokens, used, tile, [&](u32 t, uint4 sum) {
        if (used[t] != 0) *reinterpret_cast<uint4*>(sum_target(p, tokens[t], used[t]) + channel) = sum;
    });
}
