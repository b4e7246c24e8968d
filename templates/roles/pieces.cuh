// Sums of rows, in the order of a token's slots: the same bits every time.

// A warp sums 2,048 bytes of a row at once: a lane four times 16 bytes, 512 bytes apart.
constexpr u32 kPieceBytes = 2048, kPieces = ceil_div(kRowOutBytes, kPieceBytes), kStrips = kPieceBytes / 512;

struct Piece {
    u32 at;  // bytes into a row
    float sums[kStrips][8] = {};

    // Zeros past the row's end.
    DEVICE void load(uint4 (&raw)[kStrips], const u8* row) const {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            raw[i] = make_uint4(0, 0, 0, 0);
            if (at + i * 512 < kRowOutBytes) raw[i] = *reinterpret_cast<const uint4*>(row + at + i * 512);
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
};

// Adds up rows of the slots in `used`, first to last; loads of kRowsAhead are in flight together. `row_of(slot)` and
// `factor_of(slot)` are asked by the whole warp.
template <typename RowOf, typename FactorOf>
DEVICE void add_rows(Piece& piece, u32 used, RowOf row_of, FactorOf factor_of) {
    while (used != 0) {
        uint4 raw[kRowsAhead][kStrips];
        float factors[kRowsAhead] = {};
#pragma unroll
        for (u32 i = 0; i < kRowsAhead; ++i) {
            if (used == 0) break;
            const u32 slot = __ffs(used) - 1;
            used &= used - 1;
            piece.load(raw[i], row_of(slot));
            factors[i] = factor_of(slot);
        }
#pragma unroll
        for (u32 i = 0; i < kRowsAhead; ++i) {
            if (factors[i] != 0.0f) piece.add(raw[i], factors[i]);
        }
    }
}

// Layout "experts": a piece of the rows of token `n` here, as one. One whole warp.
DEVICE void add_expert_rows(const Params& p, u32 n, Piece& piece) {
    const u32* words = p.own_records + u64(n) * kRecordWords;
    const u32 slot = min_of(lane_idx(), kTopK - 1), row = words[kRecordRows + slot];
    const float weight = p.is_weighted ? __uint_as_float(words[kRecordWeights + slot]) : 1.0f;
    const u32 used = __ballot_sync(kFullMask, lane_idx() < kTopK && words[kRecordIds + slot] != kUnused);
    add_rows(
        piece, used, [&](u32 s) { return p.rows_out + i64(__shfl_sync(kFullMask, row, s)) * p.rows_stride; },
        [&](u32 s) { return __shfl_sync(kFullMask, weight, s); });
}

// The `num_parts` sums that came home for a token, and biases, as y.
DEVICE void add_up(const Params& p, u32 token, u32 num_parts, Piece piece) {
    add_rows(
        piece, num_parts == 32 ? kFullMask : (1u << num_parts) - 1,
        [&](u32 part) { return sum_on(p, p.rank, token, part); }, [](u32) { return 1.0f; });
    uint4 raw[kStrips];
    if (p.bias_0 != nullptr) {
        piece.load(raw, p.bias_0 + i64(token) * p.bias_0_stride);
        piece.add(raw, 1.0f);
    }
    if (p.bias_1 != nullptr) {
        piece.load(raw, p.bias_1 + i64(token) * p.bias_1_stride);
        piece.add(raw, 1.0f);
    }
    piece.store(p.y + i64(token) * p.y_stride);
}
