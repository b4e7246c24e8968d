// Weight tiles into the ring. Waits for nothing but the routing tables and a free stage. Weights stay in checkpoint
// layout: the 5-D map of w13 lands gate and up alternating in groups of 8 rows, straight from [gate; up]. Without a
// gate it is 3-D, as that of w2.

// MXFP4's scales of a k-block (jitmoe/mxfp4.py).
DEVICE void load_mx_scales(const Params& p, Smem& smem, const Task& task, u32 k, u32 stage, u64* full) {
    load_bulk(smem.weight_scales[stage], mx_scales(p, task) + kMxRowWords + k * kMxWords, kMxWords * 4, full);
}

// Weights that are read once are the first to leave the L2: -0.5 to -5 % in decode (14 points of S1 to S4). Those
// that several blocks of an expert read within microseconds of each other must stay: S1 2048 +4 % (H200, 2026-11-30).
DEVICE u64 weight_policy(const Smem& smem, const Task& task) {
    const u32* start = smem.block_start + task.expert;
    return kSplitTokens && start[1] - start[0] > 1 ? evict_normal() : evict_first();
}

// Of k-block k into `stage`, with the first the biases of the task in `slot`. One lane.
DEVICE void load_weights(const Params& p, Smem& smem, const Task& task, u64 policy, u32 slot, u32 k, u32 stage,
                         u64* full) {
    expect_weights(p, smem, task, slot, k, full);
    if constexpr (kMxWords > 0) load_mx_scales(p, smem, task, k, stage, full);
    void* tile = landing_tile(smem, stage);
    if (kGated && task.phase == kGemm1) {
        load_tile_5d(tile, &p.w13_map, full, policy, k * kWeightKBytes, 0, 0, task.tile * (kBlockRows / 16),
                     task.expert);
    } else {
        const TensorMap* map = kGated || task.phase == kGemm2 ? &p.w2_map : &p.w13_map;
        load_tile_3d(tile, map, full, policy, k * kWeightKBytes, task.tile * kBlockRows, task.expert);
    }
}

// What is in flight delays every other access to memory by its size over the bandwidth. All stages instead of three, in
// FP8: 1 and 8 tokens of S2 -1.8 and -1.4 %, 1 of S1, S3 and S4 -0.4 to -0.9 %; in MXFP4 S1 1 and S2 32 +1 % (H200,
// 2026-12-01). Of bf16 it is a guess.
constexpr u32 kPreloaded = kMxWords > 0 ? min_of(3 * 32768 / kLandingBytes, kNumStages) : kNumStages;

// The first tiles of the CTA's first task into the ring, on barriers of their own: the head does it as soon as it knows
// the experts' blocks. Of GEMM 1 alone: a task of GEMM 2 may have to let an orphan go first. One lane.
DEVICE void preload_weights(const Params& p, Smem& smem) {
    const u32 index = smem.first[kFirstTask];
    u32 num = 0;
    if (index < num_tasks(smem, kGemm1)) {
        const Task task = decode_task(smem, index);
        write_task(smem, 0, task);
        num = min_of(kPreloaded, task.k_end - task.k_begin);
        const u64 policy = weight_policy(smem, task);
        for (u32 i = 0; i < num; ++i) load_weights(p, smem, task, policy, 0, task.k_begin + i, i, &smem.preloaded[i]);
    }
    smem.first[kFirstPreloaded] = num;
}

DEVICE void wait_for_preloaded(const Params& p, Smem& smem, u32 k) {
    wait_barrier(p, kWaitPreloaded, &smem.preloaded[k], k, 0);
}

// For another task than the CTA's first after all. The same lane.
DEVICE void drop_preloaded(const Params& p, Smem& smem) {
    for (u32 k = 0; k < smem.first[kFirstPreloaded]; ++k) wait_for_preloaded(p, smem, k);
    smem.first[kFirstPreloaded] = 0;
}

// Decode loads k-blocks in pairs, 256 bytes of a row of weights one right after the other, as DRAM pages are supposed
// to like: -1 to -3 % (S1 to S4, 1 to 512 tokens). Prefill has no stages to wait for: S2 2048 +5 % (H200, 2026-11-30).
constexpr bool kInPairs = !kSplitTokens;

DEVICE void role_load(const Params& p, Smem& smem, const Head&) {
    if (lane_idx() != 0) return;
    Ring<kNumTaskSlots> slot;
    Ring<kNumLoadStages> ring;
    u32 num_preloaded = smem.first[kFirstPreloaded];
    for (;; slot.advance(), num_preloaded = 0) {
        const Task task = next_task(p, smem, slot);
        free_task(smem, slot);
        if (task.phase == kDone) return;
        trace_task(p, task);
        const u64 policy = weight_policy(smem, task);
        const u32 num = ceil_div(task.k_end - task.k_begin, kLandingBlocks), wanted = num - min_of(num, kClaimAhead);
        for (u32 i = 0; i < num; ++i, ring.advance()) {
            if (i == wanted) arrive(&smem.task_wanted[slot.stage]);  // pairs with role_schedule
            u64* full = landed(smem, ring.stage);
            if (i < num_preloaded) {
                wait_for_preloaded(p, smem, i);
                arrive(full);
            } else {
                if (kInPairs && (task.k_begin + i) % 2 == 0 && i + 1 < num) {
                    Ring<kNumLoadStages> second = ring;
                    second.advance();
                    wait_for_room(p, smem, second);
                }
                wait_for_room(p, smem, ring);
                load_weights(p, smem, task, policy, slot.stage, task.k_begin + i, ring.stage, full);
            }
        }
        trace_end(p, kEventTask);
    }
}
