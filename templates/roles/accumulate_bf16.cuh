// The main loop where no scales ask for promotion: the tensor cores add up a whole tile in its sums.

// A k-block, 64 deep, of a warpgroup's share. Tokens as rows: all 256 weight rows at once, for then the tokens are read
// from shared memory once. Beside expand warps a kernel may name 128 registers, too few for that: 128 rows twice.
template <u32 N, u32 kStep>
DEVICE void multiply_step(float (&sums)[kShareBlocks<true>][N], u32 weights, u32 tokens) {
    if constexpr (kExpands) {
        using Half = float[kShareBlocks<true> / 2][N];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            wgmma_bf16<descriptor_step(kStep), descriptor_step(kStep)>(
                reinterpret_cast<Half&>(sums[half * (kShareBlocks<true> / 2)]), tokens,
                weights + half * descriptor_step(kBlockRows / 2 * kBlockKBytes));
        }
    } else {
        wgmma_bf16<descriptor_step(kStep), descriptor_step(kStep)>(sums, tokens, weights);
    }
}

template <u32 N, u32 kStep>
DEVICE void multiply_step(float (&sums)[kShareBlocks<false>][N], u32 weights, u32 tokens) {
#pragma unroll
    for (u32 m = 0; m < kShareBlocks<false>; ++m) {
        const u32 block = weights + m * descriptor_step(64 * kBlockKBytes);
        wgmma_bf16<descriptor_step(kStep), descriptor_step(kStep)>(sums[m], block, tokens);
    }
}

// Pairs with role_load and with role_gather or role_feed.
DEVICE void free_stage(Smem& smem, u32 stage) {
    u32 lane = lane_idx();
    if constexpr (kTrace) forget_value(lane);  // else a traced decode kernel spills 4 bytes
    if (lane == 0) arrive(&smem.empty[stage]);
}

template <u32 kBlocks, u32 kSums>
DEVICE void multiply_k_block(float (&sums)[kBlocks][kSums], u32 weights, u32 tokens, u32 stage) {
    const u32 w = make_uniform(weights + stage * descriptor_step(kWeightTileBytes));
    const u32 t = make_uniform(tokens + stage * descriptor_step(kTokenTileBytes));
    multiply_step<kSums, 0>(sums, w, t);
    multiply_step<kSums, 32>(sums, w, t);
    multiply_step<kSums, 64>(sums, w, t);
    multiply_step<kSums, 96>(sums, w, t);
}

// `num` k-blocks into sums of a share and of extra tokens (math.cuh: Sums). One k-block's multiplies are in flight
// while the next stage is waited for; a stage is free when its own are done.
template <typename At, typename AllSums>
DEVICE void accumulate(const Params& p, Smem& smem, Ring<kNumStages>& ring, const At& at, u32 num, AllSums& sums) {
    u32 previous = 0;
#pragma unroll 1
    for (u32 k = 0; k < num; ++k) {
        wait_in_flight(p, &smem.full[ring.stage], ring.stage, ring.parity());
        if (!kSplitTokens) fence_async_shared();  // cp.async wrote the token rows in the generic proxy
        wgmma_fence();
        multiply_k_block(sums.own, at.weights, at.tokens, ring.stage);
        if constexpr (AllSums::kExtraBlocks != 0) {
            const At extra = find_extra_operands(at);
            multiply_k_block(sums.extra, extra.weights, extra.tokens, ring.stage);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0) free_stage(smem, previous);
        previous = ring.stage;
        ring.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (u32 m = 0; m < AllSums::kBlocks; ++m) hold_accumulators(sums.own[m]);
#pragma unroll
    for (u32 m = 0; m < AllSums::kExtraBlocks; ++m) hold_accumulators(sums.extra[m]);
    if constexpr (kExpands) {
#pragma unroll
        for (u32 m = 0; m < AllSums::kBlocks; ++m) scale_sums(sums.own[m]);
#pragma unroll
        for (u32 m = 0; m < AllSums::kExtraBlocks; ++m) scale_sums(sums.extra[m]);
    }
    free_stage(smem, previous);
}
