// Sums of rows in f32, in the order of a token's slots: the same bits every time. Rows come piece by piece through
// shared memory, where a warp always has as many pieces on their way as there are slots: that, not registers, keeps
// memory busy.

constexpr u32 kPieces = ceil_div(kRowOutBytes, kPieceBytes), kStrips = kPieceBytes / 512;

// A lane has four times 16 bytes of a piece, 512 bytes apart.
struct Piece {
    u32 at;  // bytes into a row
    float sums[kStrips][8] = {};

    DEVICE bool has(u32 strip) const { return at + strip * 512 < kRowOutBytes; }

    // `source` is where the lane's first bytes are.
    DEVICE void add(const u8* source, float factor) {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            if (!has(i)) continue;
            const uint4 raw = *reinterpret_cast<const uint4*>(source + i * 512);
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
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
            if (!has(i)) continue;
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; ++w) words[w] = pack_bf16(sums[i][2 * w], sums[i][2 * w + 1]);
            *reinterpret_cast<uint4*>(row + at + i * 512) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

// Of a warp that sums.
struct Summer {
    u32 warp;  // of those that do
    Ring<kNumSlots> ring, loading;

    // The pieces `turn`, `turn` + `step` and so on of the sum of the rows that lanes in `rows` have, each times the
    // lane's factor, are given to `finish(piece)`. One whole warp, which may read the rows by TMA.
    template <typename Finish>
    DEVICE void add_rows(const Params& p, Smem& smem, u32 rows, const u8* row, float factor, u32 turn, u32 step,
                         Finish finish) {
        u32 next_piece = turn, next_rows = rows;  // to be loaded
        const auto load = [&] {
            if (next_piece >= kPieces || rows == 0) return;
            if (lane_idx() == __ffs(next_rows) - 1) {
                const u32 at = next_piece * kPieceBytes, bytes = min_of(kPieceBytes, kRowOutBytes - at);
                u64* landed = &smem.piece_landed[warp][loading.stage];
                arrive_expect_bytes(landed, bytes);
                load_bulk(smem.pieces[warp][loading.stage], row + at, bytes, landed);
            }
            loading.advance();
            next_rows &= next_rows - 1;
            next_piece += next_rows == 0 ? step : 0;
            next_rows = next_rows == 0 ? rows : next_rows;
        };
        for (u32 i = 0; i < kNumSlots; ++i) load();
        for (u32 i = turn; i < kPieces; i += step) {
            Piece piece{i * kPieceBytes + lane_idx() * 16};
            for (u32 left = rows; left != 0; left &= left - 1) {
                const float of_row = __shfl_sync(kFullMask, factor, __ffs(left) - 1);
                wait_barrier(p, kWaitLanded, &smem.piece_landed[warp][ring.stage], warp, ring.parity());
                if (of_row != 0.0f) piece.add(smem.pieces[warp][ring.stage] + lane_idx() * 16, of_row);
                sync_warp();  // the slot may be loaded again
                ring.advance();
                load();
            }
            finish(piece);
        }
    }
};

DEVICE void init_piece_barriers(Smem& smem) {
    if (thread_idx() != 0) return;
    for (u32 warp = 0; warp < kNumSumWarps; ++warp) {
        for (u32 i = 0; i < kNumSlots; ++i) init_barrier(&smem.piece_landed[warp][i], 1);  // the lane that loads
    }
    fence_barrier_init();
}

// The lowest `num` bits.
DEVICE u32 first_rows(u32 num) { return num == 32 ? kFullMask : (1u << num) - 1; }

// Pieces of the `num_parts` sums that came home for a token, and of biases, as y.
DEVICE void add_up(const Params& p, Smem& smem, Summer& summer, u32 token, u32 num_parts, u32 turn, u32 step) {
    const u8* row = sum_on(p, p.rank, token, min_of(lane_idx(), kMaxParts - 1));
    summer.add_rows(p, smem, first_rows(num_parts), row, 1.0f, turn, step, [&](Piece& piece) {
        if (p.bias_0 != nullptr) piece.add(p.bias_0 + i64(token) * p.bias_0_stride + piece.at, 1.0f);
        if (p.bias_1 != nullptr) piece.add(p.bias_1 + i64(token) * p.bias_1_stride + piece.at, 1.0f);
        piece.store(p.y + i64(token) * p.y_stride);
    });
}
