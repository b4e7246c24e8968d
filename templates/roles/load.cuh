// Weight tiles into the ring. Waits for nothing but the routing tables and a free stage. Weights stay in checkpoint
// layout: the 5-D map of w13 lands gate and up alternating in groups of 8 rows, straight from [gate; up].

DEVICE void role_load(const Params& p, Smem& smem, const Head&) {
    if (lane_idx() != 0) return;
    Ring<kNumTaskSlots> slot;
    Ring<kNumStages> ring;
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        free_task(smem, slot);
        if (task.phase == kDone) return;
        trace_task(p, task);
        const u32 num_blocks_k = num_k_blocks(task);
        for (u32 k = 0; k < num_blocks_k; ++k, ring.advance()) {
            u64* full = &smem.full[ring.stage];
            wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
            arrive_expect_bytes(full, kWeightTileBytes);  // pairs with role_math: multiply
            void* tile = smem.weight_tiles[ring.stage];
            if (task.phase == kGemm1) {
                load_tile_5d(tile, &p.w13_map, full, k * kBlockK, 0, 0, task.tile * (kBlockRows / 16), task.expert);
            } else {
                load_tile_3d(tile, &p.w2_map, full, k * kBlockK, task.tile * kBlockRows, task.expert);
            }
        }
        trace_end(p, kEventTask);
    }
}
