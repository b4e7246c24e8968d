// Layout "experts": a token's rows here become one on their way.

DEVICE void init_row_barriers(Smem&) {}

struct RowMover {
    Summer summer;
    DEVICE explicit RowMover(u32 warp) : summer{kBlockChannels + warp} {}

    // Brings what tokens from `first` on have here to `target_of(i)`, which the whole warp is asked for.
    template <typename TargetOf>
    DEVICE void move(const Params& p, Smem& smem, u32 first, u32 num, TargetOf target_of) {
        const u32 slot = min_of(lane_idx(), kTopK - 1);
        for (u32 i = 0; i < num; ++i) {
            u8* target = target_of(i);
            const u32* words = p.own_records + u64(first + i) * kRecordWords;
            const bool used = lane_idx() < kTopK && words[kRecordIds + slot] != kUnused;
            const u8* row = p.rows_out + (used ? i64(words[kRecordRows + slot]) * p.rows_stride : 0);
            const float weight = p.is_weighted ? __uint_as_float(words[kRecordWeights + slot]) : 1.0f;
            const auto store = [&](const Piece& piece) { piece.store(target); };
            summer.add_rows(p, smem, __ballot_sync(kFullMask, used), row, weight, store);
        }
    }
};
