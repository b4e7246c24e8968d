// Rows on their way from x through shared memory: buffers of a warp, which it loads ahead or quantises into.

using RowRing = Ring<kNumRowBuffers>;

DEVICE u8* row_buffer(Smem& smem, u32 warp, const RowRing& ring) { return smem.buffers[warp][ring.stage]; }

DEVICE void init_row_barriers(Smem& smem) {
    if (thread_idx() != 0) return;
    init_barrier(&smem.places_found[0], kNumNotifyWarps);  // a lane of each notify warp
    for (u32 warp = 0; warp < kNumDispatchWarps; ++warp) {
        for (u32 i = 0; i < kNumRowBuffers; ++i) init_barrier(&smem.landed[warp][i], 1);  // the warp's lane 0
    }
    fence_barrier_init();
}

// Starts a token's row on its way into a buffer that no store reads any more. One whole warp.
DEVICE void load_row(const Params& p, Smem& smem, u32 warp, u32 token, const RowRing& ring) {
    if (quantizes_x(p) || lane_idx() != 0) return;
    u64* landed = &smem.landed[warp][ring.stage];
    arrive_expect_bytes(landed, kRowBytes);
    load_bulk(row_buffer(smem, warp, ring), p.x + i64(token) * p.x_stride, kRowBytes, landed);
}

// Until the row is there; or quantises it there, and its scales into Smem::scales. One whole warp.
DEVICE void wait_for_row(const Params& p, Smem& smem, u32 warp, u32 token, const RowRing& ring) {
    if (!quantizes_x(p)) {
        wait_barrier(p, kWaitLanded, &smem.landed[warp][ring.stage], warp, ring.parity());
        return;
    }
    u8* row = row_buffer(smem, warp, ring);
    const u8* source = p.x + i64(token) * p.x_stride;
    constexpr u32 kBatch = min_of(ceil_div(kHidden, 512), 7u);  // loads of 1,024 bytes in flight
    for (u32 base = 0; base < kHidden; base += kBatch * 512) {  // all lanes: quantize_16 wants them
        const u32 first = base + lane_idx() * 16;
        uint4 raw[kBatch][2] = {};
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 channel = first + i * 512;
            if (channel >= kHidden) continue;
            raw[i][0] = *reinterpret_cast<const uint4*>(source + channel * 2);
            raw[i][1] = *reinterpret_cast<const uint4*>(source + channel * 2 + 16);
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 channel = first + i * 512;
            const Quantized q = quantize_16(raw[i]);
            if (channel >= kHidden) continue;
            *reinterpret_cast<uint4*>(row + channel) = q.codes;
            if (lane_idx() % 8 == 0) smem.scales[warp][channel / 128] = q.scale;
        }
    }
    fence_async_shared();
    sync_warp();
}

// Scale of a group of the row that is in a warp's buffer.
DEVICE float scale_of_row(const Params& p, Smem& smem, u32 warp, u32 token, u32 group) {
    return p.x_is_bf16 ? smem.scales[warp][group]
                       : p.x_scale[i64(token) * p.x_scale_token_stride + i64(group) * p.x_scale_group_stride];
}

// Pairs with role_notify, whose waits have budgets: it always arrives. If it gave up, all leave; else rows may be
// stored over.
DEVICE void wait_for_places(Smem& smem) {
    while (!try_wait(&smem.places_found[0], 0)) continue;
    if (smem.first[kFirstAborted] != 0) exit_thread();
    fence_async_global();
}
