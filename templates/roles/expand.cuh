// The expand warps of a prefill launch, for MXFP4 weights (OCP Microscaling Formats 1.0). Weights land packed, two e2m1
// codes a byte, the first in the low half, in a ring of their own. From there these warps write them in the tokens'
// type, as expand_*.cuh says, into the weight tiles that the main loops of FP8 and bf16 take.

constexpr u32 kWeightArrivals = kNumExpandWarps;  // at a full stage
constexpr u32 kRowsAhead = 2;                     // loaded before the first is stored

DEVICE void init_landing(Smem& smem) {
    for (u32 i = 0; i < kNumLoadStages; ++i) {
        init_barrier(&smem.landed[i], 1);               // the load lane
        init_barrier(&smem.taken[i], kNumExpandWarps);  // a lane of each expand warp
    }
}

DEVICE u8* landing_tile(Smem& smem, u32 stage) { return smem.packed_tiles[stage]; }

// Pairs with role_expand, as the next.
DEVICE u64* landed(Smem& smem, u32 stage) { return &smem.landed[stage]; }

DEVICE void wait_for_room(const Params& p, Smem& smem, const Ring<kNumLoadStages>& ring) {
    wait_barrier(p, kWaitTaken, &smem.taken[ring.stage], ring.stage, ring.empty_parity());
}

DEVICE void role_expand(const Params& p, Smem& smem, const Head&) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumLoadStages> packed;
    Ring<kNumStages> ring;
    const Chunks mine = find_chunks();
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        free_task(smem, slot);
        if (task.phase == kDone) return;
        trace_task(p, task);
        for (u32 k = task.k_begin; k < task.k_end; ++k, ring.advance()) {
            const u32 block = k % kLandingBlocks;
            if (block == 0) {
                wait_barrier(p, kWaitLanded, &smem.landed[packed.stage], packed.stage, packed.parity());
            }
            const Scales scales = load_scales(smem, mine, packed.stage, block);
            uint4 codes[kRowsAhead];
#pragma unroll
            for (u32 i = 0; i < kRowsAhead; ++i) codes[i] = load_codes(smem, mine, packed.stage, block, i);
            wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
#pragma unroll
            for (u32 i = 0; i < kRowsALane; ++i) {
                store_chunk(smem, mine, ring.stage, i, codes[i % kRowsAhead], scales);
                if (i + kRowsAhead < kRowsALane) {
                    codes[i % kRowsAhead] = load_codes(smem, mine, packed.stage, block, i + kRowsAhead);
                }
            }
            fence_async_shared();  // the tensor cores read the tile
            sync_warp();
            if (lane_idx() == 0) arrive(&smem.full[ring.stage]);  // pairs with role_math: multiply, accumulate
            if (block + 1 < kLandingBlocks && k + 1 < task.k_end) continue;
            if (lane_idx() == 0) arrive(&smem.taken[packed.stage]);  // pairs with role_load
            packed.advance();
        }
        trace_end(p, kEventTask);
    }
}
