// MXFP4 weights: e2m1 codes, two a byte, the first in the low half, and a scale in e8m0, 2^(byte - 127), for 32 along a
// row (OCP Microscaling Formats 1.0). In decode they stay so in shared memory: math warps expand the codes of their
// rows into registers, the tensor cores' first operand.

static_assert(!kSplitTokens && kWeightKBytes == 64, "a k-block is 128 codes of a row, tokens are its columns");

constexpr u32 kChunks = kWeightKBytes / 16;  // of 32 codes

// This lane's codes: word t%4 of the 16-byte chunks of rows 16w + t/4, of each block of 64 rows, and that + 8. TMA's
// 64-byte swizzle lands chunk c of row r at chunk c ^ (r / 2 % 4), which is the same for all of them.
struct PackedRows {
    const u8* first;  // in stage 0
    u32 swizzle;      // to be XORed with 16 * chunk

    DEVICE u32 codes(u32 stage, u32 m, u32 half, u32 c) const {
        const u8* rows = first + stage * kWeightTileBytes + (m * 64 + half * 8) * kWeightKBytes;
        return *reinterpret_cast<const u32*>(rows + (c * 16 ^ swizzle));
    }
};

DEVICE PackedRows find_packed_rows(const Smem& smem, u32 first_row) {
    const u32 row = first_row + warp_idx() % 4 * 16 + lane_idx() / 4;
    return {smem.weight_tiles[0] + row * kWeightKBytes + lane_idx() % 4 * 4, row / 2 % 4 * 16};
}
