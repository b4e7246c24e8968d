// Layout "experts": a token's rows here become one on their way.

DEVICE void init_row_barriers(Smem&) {}

struct RowMover {
    u32 warp;

    // Brings what tokens from `first` on have here to `target_of(i)`, which the whole warp is asked for.
    template <typename TargetOf>
    DEVICE void move(const Params& p, Smem&, u32 first, u32 num, TargetOf target_of) {
        for (u32 i = 0; i < num; ++i) {
            u8* target = target_of(i);
            for (u32 at = 0; at < kRowOutBytes; at += kPieceBytes) {
                Piece piece{at + lane_idx() * 16};
                add_expert_rows(p, first + i, piece);
                piece.store(target);
            }
        }
    }
};
