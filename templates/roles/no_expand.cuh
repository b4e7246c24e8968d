// In place of expand.cuh where weights land as the math warps take them: no warps between.

constexpr u32 kWeightArrivals = 1;  // at a full stage: the load lane

DEVICE void init_landing(Smem&) {}

DEVICE u8* landing_tile(Smem& smem, u32 stage) { return smem.weight_tiles[stage]; }

// Pairs with role_math: multiply, as the next.
DEVICE u64* landed(Smem& smem, u32 stage) { return &smem.full[stage]; }

DEVICE void wait_for_room(const Params& p, Smem& smem, const Ring<kNumLoadStages>& ring) {
    wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
}
