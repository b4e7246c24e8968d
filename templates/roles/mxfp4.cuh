// MXFP4 weights: e2m1 codes, two a byte, the first in the low half, and a scale in e8m0, 2^(byte - 127), for 32 along a
// row (OCP Microscaling Formats 1.0). In decode they stay so in shared memory: math warps expand the codes of their
// rows into registers, the tensor cores' first operand.

static_assert(!kSplitTokens && (kWeightKBytes == 64 || kWeightKBytes == 128), "rows land with a swizzle's span");

constexpr u32 kChunks = kWeightKBytes / 16;  // of 32 codes

// Codes of the warp's 16 rows of each block of 64 rows, by ldmatrix: a lane gets word t%4 of a 16-byte chunk of row
// t/4, and of row t/4 + 8. TMA's swizzle of 128 bytes lands chunk c of row r at c ^ (r % 8), that of 64 bytes at
// c ^ (r / 2 % 4): the same in all blocks.
struct PackedRows {
    const u8* row;  // that this lane gives the address of, in stage 0
    u32 swizzle;    // to be XORed with 16 * chunk

    // Chunks number c and, where there are more, following ones; c is even then.
    template <u32 kNum>
    DEVICE void load(u32 stage, u32 m, u32 c, u32 (&words)[kNum][2]) const {
        const u8* block = row + stage * kWeightTileBytes + m * (64 * kWeightKBytes);
        if constexpr (kNum == 1) {
            load_matrices(block + (c * 16 ^ swizzle), words[0]);
        } else {
#pragma unroll
            for (u32 i = 0; i < kNum; i += 2) {
                u32 four[4];
                load_matrices(block + ((c + i) * 16 ^ swizzle), four);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) words[i + j / 2][j % 2] = four[j];
            }
        }
    }
};

// Lanes 0..15 name the rows of a chunk, the others those of the next.
DEVICE PackedRows find_packed_rows(const Smem& smem, u32 first_row) {
    const u32 row = first_row + warp_idx() % 4 * 16 + lane_idx() % 16;
    const u32 swizzle = kWeightKBytes == 128 ? row % 8 : row / 2 % 4;
    return {smem.weight_tiles[0] + row * kWeightKBytes, (swizzle ^ lane_idx() / 16) * 16};
}
