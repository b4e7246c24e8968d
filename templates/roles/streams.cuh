// Rows that are summed come piece by piece through shared memory, where a warp always has as many on their way as it
// has slots: that, not registers, keeps memory busy.

// Of a warp that sums.
struct Summer {
    u32 warp;  // of those that do
    Ring<kNumSlots> ring, loading;

    // Gives `finish(piece)` the sum of the rows that lanes in `rows` have, each times the lane's factor, a piece after
    // the other. One whole warp, which may read the rows by TMA.
    template <typename Finish>
    DEVICE void add_rows(const Params& p, Smem& smem, u32 rows, const u8* row, float factor, Finish finish) {
        u32 next_piece = 0, next_rows = rows;  // to be loaded
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
            next_piece += next_rows == 0;
            next_rows = next_rows == 0 ? rows : next_rows;
        };
        for (u32 i = 0; i < kNumSlots; ++i) load();
        for (u32 i = 0; i < kPieces; ++i) {
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
