// Layout "tokens": rows are sums already, and go through shared memory as they are. Needs few registers.

using RowRing = Ring<kNumRowBuffers>;

DEVICE void init_row_barriers(Smem& smem) {
    if (thread_idx() != 0) return;
    for (u32 warp = 0; warp < kNumScaleUpWarps; ++warp) {
        for (u32 i = 0; i < kNumRowBuffers; ++i) init_barrier(&smem.landed[warp][i], 1);  // the warp's lane 0
    }
    fence_barrier_init();
}

struct RowMover {
    u32 warp;
    RowRing ring, loading;

    DEVICE void load(const Params& p, Smem& smem, u32 n) {
        wait_for_stores_read<0>();
        sync_warp();  // all lanes have seen the last row here land
        if (lane_idx() == 0) {
            u64* landed = &smem.landed[warp][loading.stage];
            arrive_expect_bytes(landed, kRowOutBytes);
            load_bulk(smem.buffers[warp][loading.stage], p.rows_out + i64(n) * p.rows_stride, kRowOutBytes, landed);
        }
        loading.advance();
    }

    // Brings `num` rows from `first` on to `target_of(i)`, which the whole warp is asked for.
    template <typename TargetOf>
    DEVICE void move(const Params& p, Smem& smem, u32 first, u32 num, TargetOf target_of) {
        load(p, smem, first);
        for (u32 i = 0; i < num; ++i) {
            if (kNumRowBuffers > 1 && i + 1 < num) load(p, smem, first + i + 1);
            u8* target = target_of(i);
            wait_barrier(p, kWaitLanded, &smem.landed[warp][ring.stage], warp, ring.parity());
            if (lane_idx() == 0) store_bulk(target, smem.buffers[warp][ring.stage], kRowOutBytes);
            commit_stores();
            ring.advance();
            if (kNumRowBuffers == 1 && i + 1 < num) load(p, smem, first + i + 1);
        }
        wait_for_stores<0>();
    }
};
