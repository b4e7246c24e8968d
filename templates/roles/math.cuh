// The math warpgroups: partial sums of 128-deep k-blocks on the tensor cores, promoted to fp32 with the scales of their
// tokens and weights; then the epilogue of the phase. Weights are the 64-row operand, tokens the columns.
//
// decode:  the two warpgroups split a tile's 256 weight rows and share its tokens.
// prefill: each takes all rows for 64 tokens of its own and knows nothing of the other.

// sums += partial * scale, for one 64-row block.
template <u32 N>
DEVICE void promote(float (&sums)[N / 2], const float (&partial)[N / 2], const float4* scales) {
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j) {
        const float4 s = scales[j * 4];
        sums[4 * j + 0] = fmaf(partial[4 * j + 0], s.x, sums[4 * j + 0]);
        sums[4 * j + 1] = fmaf(partial[4 * j + 1], s.y, sums[4 * j + 1]);
        sums[4 * j + 2] = fmaf(partial[4 * j + 2], s.z, sums[4 * j + 2]);
        sums[4 * j + 3] = fmaf(partial[4 * j + 3], s.w, sums[4 * j + 3]);
    }
}

// Where the warpgroup reads in a stage, and which scale products its row blocks take: all that the main loop needs.
struct Operands {
    u32 weights, tokens;  // low descriptor words in stage 0
    u32 scale_offset;     // of this lane's first token pair
    bool gemm_2;
};

DEVICE Operands find_operands(const Smem& smem, const Task& task, const Share& share) {
    return {descriptor_low(smem.weight_tiles[0] + share.first_row * kBlockK),
            descriptor_low(smem.token_tiles[0] + share.first_token * kBlockK), share.first_token / 2 + lane_idx() % 4,
            task.phase == kGemm2};
}

// kUnroll k-blocks. Two accumulators alternate: the tensor cores fill one while the other is promoted. The last wait
// leaves nothing in flight, else ptxas serialises the loop around this (C7514).
template <u32 N, u32 kUnroll>
DEVICE void multiply(const Params& p, Smem& smem, Ring<kNumStages>& ring, const Operands& at,
                     float (&sums)[kNumRowBlocks][N / 2]) {
    constexpr u32 kSteps = kUnroll * kNumRowBlocks;
    float partial[2][N / 2];
    u32 previous = 0;  // stage of the step before
#pragma unroll
    for (u32 step = 0; step <= kSteps; ++step) {
        if (step < kSteps) {
            const u32 m = step % kNumRowBlocks;
            if (step == 0) {
                // Pairs with role_load and publish_k_block.
                wait_barrier(p, kWaitStageFull, &smem.full[ring.stage], ring.stage, ring.parity());
            } else if (m == 0) {
                forget_value(ring.stage);
                wait_in_flight(p, &smem.full[ring.stage], ring.parity());
            }
            const u32 a = at.weights + ring.stage * descriptor_step(kWeightTileBytes) + m * descriptor_step(64 * kBlockK);
            const u32 b = at.tokens + ring.stage * descriptor_step(kTokenTileBytes);
            hold_accumulators(partial[step % 2]);
            wgmma_fence();
            wgmma<false, 0, 0>(partial[step % 2], a, b);
            wgmma<true, descriptor_step(32), descriptor_step(32)>(partial[step % 2], a, b);
            wgmma<true, descriptor_step(64), descriptor_step(64)>(partial[step % 2], a, b);
            wgmma<true, descriptor_step(96), descriptor_step(96)>(partial[step % 2], a, b);
            wgmma_commit();
        }
        if (step > 0) {
            const u32 m = (step - 1) % kNumRowBlocks;
            if (step < kSteps) {
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
            hold_accumulators(partial[(step - 1) % 2]);
            const float4* scales = smem.scales[previous][scale_variant(at.gemm_2, m)] + at.scale_offset;
            promote<N>(sums[m], partial[(step - 1) % 2], scales);
            if (m == kNumRowBlocks - 1) {
                sync_warp();
                if (lane_idx() == 0) arrive(&smem.empty[previous]);  // pairs with role_load and role_gather
            }
        }
        if (step < kSteps) previous = ring.stage;
        if (step < kSteps && step % kNumRowBlocks == kNumRowBlocks - 1) ring.advance();
    }
}

template <u32 N>
DEVICE void run_tile(const Params& p, Smem& smem, Ring<kNumStages>& ring, const Task& task, const Share& share,
                     u32 slot, u32 amax_parity) {
    constexpr u32 kUnroll = N == kWarpgroupTokens ? kUnrollK : 1;
    float sums[kNumRowBlocks][N / 2] = {};
    const Operands at = find_operands(smem, task, share);
    u32 k = num_k_blocks(task);
#pragma unroll 1
    for (; k >= kUnroll; k -= kUnroll) multiply<N, kUnroll>(p, smem, ring, at, sums);
    if constexpr (kUnroll > 1) {
#pragma unroll 1
        for (; k > 0; --k) multiply<N, 1>(p, smem, ring, at, sums);
    }
    // Read again rather than kept in registers over the main loop.
    const Task same = read_task(smem, slot);
    const Share same_share = find_share(same);
    const u32* pairs = smem.task_rows[slot] + same_share.first_token;
    if (same.phase == kGemm1) {
        store_mid<N>(p, smem, same, same_share, pairs, sums, amax_parity);
    } else {
        store_slices<N>(p, smem, same, same_share, pairs, sums);
    }
}

// A warpgroup without tokens still consumes the ring.
DEVICE void skip_tile(const Params& p, Smem& smem, Ring<kNumStages>& ring, const Task& task) {
    for (u32 k = num_k_blocks(task); k > 0; --k, ring.advance()) {
        wait_barrier(p, kWaitStageFull, &smem.full[ring.stage], ring.stage, ring.parity());
        sync_warp();
        if (lane_idx() == 0) arrive(&smem.empty[ring.stage]);
    }
}

DEVICE void role_math(const Params& p, Smem& smem, const Head& head) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumStages> ring;
    u32 amax_parity = 0;
    for (;; slot.advance()) {
        {
            const Task task = next_task(p, smem, slot);
            if (task.phase == kDone) return;
            const Share share = find_share(task);
            if (share.num_tokens == 0) {
                skip_tile(p, smem, ring, task);
            } else if (share.num_tokens <= 8) {
                run_tile<8>(p, smem, ring, task, share, slot.stage, amax_parity);
            } else if (share.num_tokens <= 16) {
                run_tile<16>(p, smem, ring, task, share, slot.stage, amax_parity);
            } else if (share.num_tokens <= 32) {
                run_tile<32>(p, smem, ring, task, share, slot.stage, amax_parity);
            } else {
                run_tile<64>(p, smem, ring, task, share, slot.stage, amax_parity);
            }
        }
        const Task task = read_task(smem, slot.stage);
        const Share share = find_share(task);
        if (task.phase == kGemm1) {
            amax_parity ^= 1;
            publish_mid(head.bank, task, share);
        } else {
            combine_tokens(p, task, share, smem.task_rows[slot.stage] + share.first_token);
        }
        sync_warp();
        if (lane_idx() == 0) free_task(smem, slot);
    }
}
