// Token tiles and scales of a prefill launch into the ring, by one lane: TMA from the pool (GEMM 1) or the activations
// between the GEMMs. Rows past the end of an expert are copied too; nothing reads what comes of them.

// At a full stage: with the bytes of the copies; after the weight scales of blocks.
constexpr u32 kFeedArrivals = kQuantizes && !kChannelScales ? 2 : 1;

DEVICE void role_feed(const Params& p, Smem& smem, const Head& head) {
    if (lane_idx() != 0) return;
    Ring<kNumTaskSlots> slot;
    Ring<kNumStages> ring;
    wait_for_head(p, head);
    fence_async_global();
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        free_task(smem, slot);
        if (task.phase == kDone) return;
        trace_task(p, task);
        if (task.phase == kGemm2) {
            wait_for_mid(p, head, task.block);
            fence_async_global();
        }
        const TensorMap* map = task.phase == kGemm1 ? &p.pool_map : &p.mid_map;
        const float* scales = nullptr;
        if constexpr (kQuantizes) scales = (task.phase == kGemm1 ? p.pool_scale : p.mid_scale) + task.row_start;
        const TensorMap* extra_map = task.phase == kGemm1 ? &p.pool_extra_map : &p.mid_extra_map;
        // In one copy, two or three.
        const u32 num_tokens = has_extra_tokens(task) ? kTileTokens
                               : has_token_rows(task) ? kBlockTokens
                                                      : kWarpgroupTokens;
        const float* weight_scales[3] = {};
        if constexpr (kQuantizes) {
#pragma unroll
            for (u32 i = 0; i < 3; ++i) weight_scales[i] = weight_scale(p, task, i);
        }
        for (u32 k = task.k_begin; k < task.k_end; ++k, ring.advance()) {
            u64* full = &smem.full[ring.stage];
            wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
            // Both pair with role_math: multiply.
            arrive_expect_bytes(full, num_tokens * (kBlockKBytes + (kQuantizes ? u32(sizeof(float)) : 0)));
            u8* tile = smem.token_tiles[ring.stage];
            load_tile_2d(tile, map, full, k * kBlockKBytes, task.row_start);
            if (num_tokens > kWarpgroupTokens) {
                load_tile_2d(tile + kWarpgroupTokens * kBlockKBytes, map, full, k * kBlockKBytes,
                             task.row_start + kWarpgroupTokens);
            }
            if (num_tokens > kBlockTokens) {
                load_tile_2d(tile + kBlockTokens * kBlockKBytes, extra_map, full, k * kBlockKBytes,
                             task.row_start + kBlockTokens);
            }
            if constexpr (!kQuantizes) continue;
            load_bulk(smem.token_scales[ring.stage], scales + u64(k) * p.row_capacity, num_tokens * sizeof(float),
                      full);
            if constexpr (kChannelScales) continue;
#pragma unroll
            for (u32 i = 0; i < 3; ++i) copy_4_async(&smem.weight_scales[ring.stage][i], weight_scales[i] + k);
            arrive_after_copies(full);
        }
        trace_end(p, kEventTask);
    }
}
