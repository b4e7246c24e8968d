// What the expand warps make of MXFP4 weights beside bf16 tokens: codes times scales, two k-blocks of what lands
// together. The exponent and mantissa bits of e2m1 at bit 6 are a bf16 number 2^-126 as large, subnormals too. Packed
// scales are 2^66 as large, so that the weights stay normal for scales from 2^-65 on, and the sums make up for the
// rest.
template <u32 kNum>
DEVICE void scale_sums(float (&sums)[kNum]) {
#pragma unroll
    for (float& sum : sums) sum *= 1152921504606846976.0f;  // 2^60
}

// Eight codes times `scale`, a pair of the same. A selector of bytes is three bits of a code; its sign is the fourth.
DEVICE uint4 expand_codes(u32 codes, u32 scale) {
    constexpr u32 kSigns = 0x80808080u;
    constexpr u32 kHigh = 0x01010101u, kLow = 0xc0804000u;  // bytes of magnitudes 4 to 7, and of 0 to 3 and 4 to 7
    const u32 magnitudes = codes & 0x77777777u, even = codes << 4;
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {  // of four codes
        const u32 four = i == 0 ? magnitudes : magnitudes >> 16;
        const u32 low = permute_bytes(kLow, kLow, four);
        const u32 signs = permute_bytes(even, codes, i == 0 ? 0x5140 : 0x7362);
        const u32 high = permute_bytes(0, kHigh, four) | (signs & kSigns);
        pairs[2 * i] = multiply_bf16x2(permute_bytes(low, high, 0x5140), scale);
        pairs[2 * i + 1] = multiply_bf16x2(permute_bytes(low, high, 0x7362), scale);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// What a lane expands of a k-block: one of its two chunks of 32 codes, of every 16th of the warp's 64 rows. TMA's
// 64-byte swizzle lands chunk c of row r at chunk c ^ (r / 2 % 4).
struct Chunks {
    u32 row;    // the first
    u32 chunk;  // in the k-block
};

constexpr u32 kRowsALane = 4;

DEVICE Chunks find_chunks() {
    const u32 lane = lane_idx();
    return {(warp_idx() - kExpandWarpBegin) * 64 + lane / 2, lane % 2};
}

DEVICE uint4 load_codes(const Smem& smem, const Chunks& c, u32 stage, u32 block, u32 i) {
    const u32 place = (block * 2 + c.chunk) ^ (c.row / 2 % 4);
    return *reinterpret_cast<const uint4*>(smem.packed_tiles[stage] + (c.row + i * 16) * kWeightKBytes + place * 16);
}

// Of the chunk of the lane's rows, e8m0.
struct Scales {
    u32 of[kRowsALane];
};

// A row's words lie as math warps of the decode kernel read them (jitmoe/mxfp4.py): rows of 16w + i and + 8 of blocks
// of 64.
DEVICE Scales load_scales(const Smem& smem, const Chunks& c, u32 stage, u32 block) {
    const u32 pair = c.row / 128 * 4, i = c.row % 8, place = c.row / 64 % 2 * 2 + c.row / 8 % 2;
    Scales scales;
#pragma unroll
    for (u32 w = 0; w < kRowsALane; ++w) {
        const u32 word = ((pair + w) * 8 + i) * 4 + place;
        scales.of[w] = smem.weight_scales[stage][word * 4 + block * 2 + c.chunk];
    }
    return scales;
}

DEVICE void store_chunk(Smem& smem, const Chunks& c, u32 stage, u32 i, uint4 codes, const Scales& scales) {
    const u32 scale = scales.of[i] * 0x00800080;
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    u8* row = smem.weight_tiles[stage] + i * (16 * kBlockKBytes);
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
        *reinterpret_cast<uint4*>(row + swizzle_128(c.row, 4 * c.chunk + n)) = expand_codes(words[n], scale);
    }
}
