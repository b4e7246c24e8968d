// What the expand warps make of MXFP4 weights beside e4m3 tokens: a code's value times 2^6, and times the power of two
// that the scale of its 32 is of the row's largest, which is the channel's scale (channel_scales.cuh). That power is
// 2^(exponent - 12); exponent 0 stands for smaller ones too, and has no 0.5.

// The eight magnitudes times 2^(exponent - 6), in e4m3, whose exponent is bits 3..6: that of 0.5 is the chunk's.
DEVICE uint2 magnitudes_of(u32 exponent) {
    return make_uint2(exponent * 0x08080800u + 0x0c080000u, exponent * 0x08080808u + 0x1c181410u);
}

// Eight codes. A selector of bytes is three bits of a code; its sign is the fourth.
DEVICE uint2 expand_codes(u32 codes, uint2 of_magnitude) {
    constexpr u32 kSigns = 0x80808080u;
    const u32 magnitudes = codes & 0x77777777u;
    const u32 even = codes << 4;  // signs of even codes at bit 7 of a byte, as those of odd ones in `codes`
    return make_uint2(
        permute_bytes(of_magnitude.x, of_magnitude.y, magnitudes) | (permute_bytes(even, codes, 0x5140) & kSigns),
        permute_bytes(of_magnitude.x, of_magnitude.y, magnitudes >> 16) |
            (permute_bytes(even, codes, 0x7362) & kSigns));
}

// What a lane expands of a tile: a chunk of 32 codes of every eighth of the warp's 64 rows. TMA's 64-byte swizzle lands
// chunk c of row r at chunk c ^ (r / 2 % 4), so that a warp reads 512 bytes as they lie.
struct Chunks {
    u32 row;    // the first
    u32 place;  // of the chunk in the packed row
    u32 chunk;
};

constexpr u32 kRowsALane = 8;

DEVICE Chunks find_chunks() {
    const u32 lane = lane_idx(), row = (warp_idx() - kExpandWarpBegin) * 64 + lane / 4;
    return {row, lane % 4, lane % 4 ^ row / 2 % 4};
}

DEVICE uint4 load_codes(const Smem& smem, const Chunks& c, u32 stage, u32, u32 i) {
    return *reinterpret_cast<const uint4*>(smem.packed_tiles[stage] + (c.row + i * 8) * kWeightKBytes + c.place * 16);
}

// Exponents of the chunks of the lane's rows, 16 bits a row (jitmoe/mxfp4.py).
struct Scales {
    u32 of[kRowsALane / 2];
};

DEVICE Scales load_scales(const Smem& smem, const Chunks& c, u32 stage, u32) {
    const u32 rows = c.row / 64 * 8 + c.row % 8;
    const uint4 four = *reinterpret_cast<const uint4*>(smem.weight_scales[stage] + rows * (kRowsALane * 2));
    return {{four.x, four.y, four.z, four.w}};
}

DEVICE void store_chunk(Smem& smem, const Chunks& c, u32 stage, u32 i, uint4 codes, const Scales& scales) {
    const uint2 table = magnitudes_of(scales.of[i / 2] >> (i % 2 * 16 + c.chunk * 4) & 15);
    const uint2 x = expand_codes(codes.x, table), y = expand_codes(codes.y, table);
    const uint2 z = expand_codes(codes.z, table), w = expand_codes(codes.w, table);
    u8* row = smem.weight_tiles[stage] + i * (8 * kBlockKBytes);
    *reinterpret_cast<uint4*>(row + swizzle_128(c.row, 2 * c.chunk)) = make_uint4(x.x, x.y, y.x, y.y);
    *reinterpret_cast<uint4*>(row + swizzle_128(c.row, 2 * c.chunk + 1)) = make_uint4(z.x, z.y, w.x, w.y);
}
