// One rank: y is the sum of a token's slices in slot order, if it has several (one_rank.cuh: goes_alone); tiles sum the
// tokens that they complete.

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
        uint4 rows[kCombineTokens][kSlots] = {};
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
            const u16* row = first_row + (u64(tokens[t]) * kTopK + first) * kHidden + channel;
#pragma unroll
            for (u32 i = 0; i < kSlots; ++i) {
                if (used[t] >> (first + i) & 1) {
                    rows[t][i] = *reinterpret_cast<const uint4*>(row + u64(i) * kHidden);
                }
            }
        }
#pragma unroll
        for (u32 t = 0; t < kCombineTokens; ++t) {
#pragma unroll
            for (u32 i = 0; i < kSlots; ++i) add_channels(sums[t], rows[t][i]);
        }
    }
#pragma unroll
    for (u32 t = 0; t < kCombineTokens; ++t) store(t, pack_channels(sums[t]));
}

// Many ranks: see combine_many_ranks.cuh.
DEVICE void finish_expert_tile(const Params&, const Smem&, const Head&, u32, u32) {}
DEVICE void combine_ranks(const Params&, u32, u32) {}
DEVICE void wait_for_sums(const Params&, Smem&) {}
DEVICE void init_sums(Smem&) {}
DEVICE void end_sums(Smem&) {}
