// Sums of rows in f32, in the order of a token's slots: the same bits every time.

// A warp sums a piece of a row at once: a lane some 16 bytes of it, 512 bytes apart.
constexpr u32 kPieces = ceil_div(kRowOutBytes, kPieceBytes), kStrips = kPieceBytes / 512;

struct Piece {
    u32 at;  // bytes into a row, of the lane's first
    float sums[kStrips][8] = {};

    // From where the lane's first bytes are; zeros past the row's end.
    DEVICE void load(uint4 (&raw)[kStrips], const u8* source) const {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            raw[i] = make_uint4(0, 0, 0, 0);
            if (at + i * 512 < kRowOutBytes) raw[i] = *reinterpret_cast<const uint4*>(source + i * 512);
        }
    }

    DEVICE void add(const uint4 (&raw)[kStrips], float factor) {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                sums[i][2 * w] += bf16_low(words[w]) * factor;
                sums[i][2 * w + 1] += bf16_high(words[w]) * factor;
            }
        }
    }
    DEVICE void add(const u8* source, float factor) {
        uint4 raw[kStrips];
        load(raw, source);
        add(raw, factor);
    }

    DEVICE void store(u8* row) const {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            if (at + i * 512 >= kRowOutBytes) continue;
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; ++w) words[w] = pack_bf16(sums[i][2 * w], sums[i][2 * w + 1]);
            *reinterpret_cast<uint4*>(row + at + i * 512) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    // The sum of what came home for a token, with its biases, as y.
    DEVICE void store_y(const Params& p, u32 token) {
        if (p.bias_0 != nullptr) add(p.bias_0 + i64(token) * p.bias_0_stride + at, 1.0f);
        if (p.bias_1 != nullptr) add(p.bias_1 + i64(token) * p.bias_1_stride + at, 1.0f);
        store(p.y + i64(token) * p.y_stride);
    }
};

// The lowest `num` bits.
DEVICE u32 first_rows(u32 num) { return num == 32 ? kFullMask : (1u << num) - 1; }
