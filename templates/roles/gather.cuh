// Token rows and scales into the ring. Rows are gathered where they lie (x, its quantised copy, or the activations
// between the GEMMs) by cp.async with the swizzle applied by hand: no pool, no copy. For every pair of tokens the warps
// also write the products of token and weight scales that the math warps multiply partial sums by.

constexpr u32 kGatherThreads = kNumGatherWarps * kWarpThreads;
constexpr u32 kGatherLag = 2;  // k-blocks a copy has to land before its stage is published

// Where a task's token rows and scales are.
struct Source {
    const u8* rows;
    i64 row_stride;
    const float* scales;
    i64 scale_row_stride, scale_group_stride;
    const float* weight_scale;  // of this lane: see weight_scale_row
};

// The weight scales of a tile, by lane. GEMM 1: gate, up, and up of the next block where `intermediate` is no
// multiple of 128 and a tile's up rows straddle two blocks. GEMM 2: the tile's two blocks of rows.
DEVICE u32 weight_scale_row(const Task& task, u32 lane) {
    if (task.phase == kGemm2) return min_of(task.tile * 2 + lane, ceil_div(kHidden, 128) - 1);
    if (lane == 0) return task.tile;
    return min_of(kUpBlockOffset + task.tile + (lane - 1), ceil_div(2 * kIntermediate, 128) - 1);
}

DEVICE Source find_source(const Params& p, const Task& task) {
    const u32 lane = min_of(lane_idx(), 2u);
    const i64 row = weight_scale_row(task, lane);
    if (task.phase == kGemm2) {
        return {p.mid + u64(task.row_start) * kMidStride,
                kMidStride,
                p.mid_scale + u64(task.row_start) * kMidScaleStride,
                kMidScaleStride,
                1,
                p.w2_scale + task.expert * p.w2_scale_expert_stride + row * p.w2_scale_row_stride};
    }
    const float* weight_scale = p.w13_scale + task.expert * p.w13_scale_expert_stride + row * p.w13_scale_row_stride;
    if (p.x_is_bf16) return {p.x_quant, kHidden, p.x_quant_scale, kXQuantScaleStride, 1, weight_scale};
    return {p.x, p.x_stride, p.x_scale, p.x_scale_token_stride, p.x_scale_group_stride, weight_scale};
}

// Row i of the task inside its source: tokens for GEMM 1, consecutive rows for GEMM 2.
DEVICE u32 source_row(const Smem& smem, const Task& task, u32 stage, u32 i) {
    return task.phase == kGemm1 ? smem.task_rows[stage][i] / kTopK : i;
}

// Start the copies of one k-block.
DEVICE void copy_k_block(Smem& smem, const Task& task, const Source& source, u32 slot, u32 stage, u32 k) {
    const u32 warp = warp_idx() - kGatherWarpBegin, lane = lane_idx();
    u8* tile = smem.token_tiles[stage];
    const u32 chunk = lane % 8;
    const u8* column = source.rows + k * kBlockK + chunk * 16;
    for (u32 row = warp * 4 + lane / 8; row < task.num_rows; row += kNumGatherWarps * 4) {
        copy_16_async(tile + swizzle_128(row, chunk), column + source_row(smem, task, slot, row) * source.row_stride);
    }
    const float* group = source.scales + k * source.scale_group_stride;
    for (u32 pair = warp * kWarpThreads + lane; pair * 2 < task.num_rows; pair += kGatherThreads) {
        float* scale = reinterpret_cast<float*>(&smem.scales[stage][0][pair]);
        copy_4_async(scale, group + source_row(smem, task, slot, pair * 2) * source.scale_row_stride);
        if (pair * 2 + 1 < task.num_rows) {
            copy_4_async(scale + 1, group + source_row(smem, task, slot, pair * 2 + 1) * source.scale_row_stride);
        }
    }
    if (lane < 3) copy_4_async(&smem.weight_scales[stage][warp][lane], source.weight_scale + k);
    commit_copies();
}

// The copies of this stage are complete: write the scale products and publish it. Variant 0 and 1 of a token pair are
// {gate, gate, up, up} with up's first or second block (GEMM 1), or four times one of the two row blocks (GEMM 2).
DEVICE void publish_k_block(Smem& smem, const Task& task, u32 stage) {
    const u32 warp = warp_idx() - kGatherWarpBegin;
    sync_warp();  // weight_scales came by other lanes' copies
    const float* w = smem.weight_scales[stage][warp];
    for (u32 pair = warp * kWarpThreads + lane_idx(); pair * 2 < task.num_rows; pair += kGatherThreads) {
        const float4 x = smem.scales[stage][0][pair];
        const float low = task.phase == kGemm1 ? w[0] : w[1];
        const float high = task.phase == kGemm1 ? w[2] : w[1];
        smem.scales[stage][0][pair] = make_float4(x.x * w[0], x.y * w[0], x.x * (task.phase == kGemm1 ? w[1] : w[0]),
                                                  x.y * (task.phase == kGemm1 ? w[1] : w[0]));
        smem.scales[stage][1][pair] = make_float4(x.x * low, x.y * low, x.x * high, x.y * high);
    }
    fence_async_shared();
    sync_warp();
    if (lane_idx() == 0) arrive(&smem.full[stage]);  // pairs with role_math: multiply
}

DEVICE void role_gather(const Params& p, Smem& smem, const Head& head) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumStages> ring, landed;
    if (p.x_is_bf16) wait_for_head(p, head.bank);
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        if (task.phase == kDone) return;
        if (task.phase == kGemm2) {
            // Pairs with role_math: publish_mid.
            const u32 expected = kNumTiles1 * (kSplitTokens ? 2 : 1);
            const u32* done = head.bank + kBankBlocks + task.block;
            wait_until(p, kWaitMid, task.block, expected, [&] { return load_acquire_gpu(done) == expected; });
        }
        const Source source = find_source(p, task);
        const u32 num_blocks_k = num_k_blocks(task);
        for (u32 k = 0; k < num_blocks_k; ++k, ring.advance()) {
            wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
            copy_k_block(smem, task, source, slot.stage, ring.stage, k);
            if (k >= kGatherLag) {
                wait_copies<kGatherLag>();
                publish_k_block(smem, task, landed.stage);
                landed.advance();
            }
        }
        // The task's last k-blocks go out before anything of the next is awaited.
        wait_copies<0>();
        for (u32 k = num_blocks_k < kGatherLag ? 0 : num_blocks_k - kGatherLag; k < num_blocks_k; ++k) {
            publish_k_block(smem, task, landed.stage);
            landed.advance();
        }
        sync_warp();
        if (lane_idx() == 0) free_task(smem, slot);
    }
}
