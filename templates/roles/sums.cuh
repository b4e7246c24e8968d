// Sums of bf16 rows in f32, 8 channels a lane.

// Tokens summed at a time: the loads of their rows are in flight together. 4 instead of 2 in prefill of one rank: S1
// 512 / 2048 / 8192 +0.8, +0.5, +0.3 %, S2 2048 +0.9 % (H200, 2026-12-01). On many ranks 2 was not measured.
constexpr u32 kCombineTokens = kSplitTokens && kNumRanks > 1 ? 4 : 2;

DEVICE void add_channels(float (&sums)[8], const uint4& row) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
        sums[2 * w] += bf16_low(words[w]);
        sums[2 * w + 1] += bf16_high(words[w]);
    }
}

DEVICE uint4 pack_channels(const float (&sums)[8]) {
    return make_uint4(pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]), pack_bf16(sums[4], sums[5]),
                      pack_bf16(sums[6], sums[7]));
}
