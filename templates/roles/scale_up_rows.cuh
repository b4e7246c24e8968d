// Layout "tokens": rows are sums already, and go through shared memory as they are.

DEVICE void init_row_barriers(Smem& smem) {
    if (thread_idx() != 0) return;
    for (u32 warp = 0; warp < kBlockChannels; ++warp) init_barrier(&smem.row_landed[warp], 1);  // the warp's lane 0
    fence_barrier_init();
}

struct RowMover {
    u32 warp, num_moved = 0;

    // Brings `num` rows from `first` on to `target_of(i)`, which the whole warp is asked for.
    template <typename TargetOf>
    DEVICE void move(const Params& p, Smem& smem, u32 first, u32 num, TargetOf target_of) {
        u64* landed = &smem.row_landed[warp];
        for (u32 i = 0; i < num; ++i, ++num_moved) {
            u8* target = target_of(i);
            wait_for_stores_read<0>();
            sync_warp();  // all lanes have seen the last row land
            if (lane_idx() == 0) {
                arrive_expect_bytes(landed, kRowOutBytes);
                load_bulk(smem.rows[warp], p.rows_out + i64(first + i) * p.rows_stride, kRowOutBytes, landed);
            }
            wait_barrier(p, kWaitLanded, landed, warp, num_moved % 2);
            if (lane_idx() == 0) store_bulk(target, smem.rows[warp], kRowOutBytes);
            commit_stores();
        }
        wait_for_stores<0>();
    }
};
