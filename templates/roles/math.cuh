// The math warpgroups: partial sums of 128-deep k-blocks on the tensor cores, promoted to fp32 with the scales of their
// tokens and weights (two-level accumulation), or the whole sums (accumulate_*.cuh); then the epilogue of the phase.

// Pairs with role_load and with role_gather or role_feed.
DEVICE void wait_for_stage(const Params& p, Smem& smem, const Ring<kNumStages>& ring) {
    wait_barrier(p, kWaitStageFull, &smem.full[ring.stage], ring.stage, ring.parity());
}

// The product of one k-block's 64 rows at `a` and the columns at `b`.
template <u32 kNum>
DEVICE void multiply_block(float (&partial)[kNum], u32 a, u32 b) {
    wgmma<false, 0, 0>(partial, a, b);
    wgmma<true, descriptor_step(32), descriptor_step(32)>(partial, a, b);
    wgmma<true, descriptor_step(64), descriptor_step(64)>(partial, a, b);
    wgmma<true, descriptor_step(96), descriptor_step(96)>(partial, a, b);
}

// A warpgroup's sums of a task: of its share, and of its share of the extra tokens where the task has some.
template <u32 N, bool kTokenRows, bool kHasExtra>
struct Sums {
    static constexpr u32 kBlocks = kShareBlocks<kTokenRows>;
    static constexpr u32 kExtraBlocks = kHasExtra ? kShareBlocks<false> : 0;
    float own[kBlocks][N / 2] = {};
    float extra[kShareBlocks<false>][kExtraColumns / 2] = {};
};

// Whether step m is one of `num` from `first` on.
DEVICE constexpr bool is_among(u32 m, u32 first, u32 num) { return m - first < num; }

// kUnroll k-blocks, each of blocks of 64 weight rows. Two accumulators alternate: the tensor cores fill one while the
// other is promoted; beside sums of extra tokens, or biases and expand warps, there are registers for one. Extra tokens
// go along with the first blocks, on many ranks, for want of registers, after all. The last wait leaves nothing in
// flight, else ptxas serialises the loop around this (C7514).
template <u32 kUnroll, u32 N, bool kTokenRows, bool kHasExtra>
DEVICE void multiply(const Params& p, Smem& smem, Ring<kNumStages>& ring, const Operands& at,
                     Sums<N, kTokenRows, kHasExtra>& sums) {
    using AllSums = Sums<N, kTokenRows, kHasExtra>;
    constexpr u32 kBlocks = AllSums::kBlocks, kExtraBlocks = AllSums::kExtraBlocks;
    constexpr u32 kFirstExtra = kNumRanks == 1 ? 0 : kBlocks;
    constexpr u32 kSteps = kBlocks + (kNumRanks == 1 ? 0 : kExtraBlocks), kAllSteps = kUnroll * kSteps;
    // Steps in flight while one is promoted.
    constexpr u32 kAhead = kHasExtra || (kHasBias && kExpands) ? 0 : 1;
    float partial[kAhead + 1][N / 2], extra_partial[kExtraColumns / 2];
    Promotion<N, kTokenRows> promotion;
    Promotion<kExtraColumns, false> extra_promotion;
    u32 weights = 0, tokens = 0;
    u32 previous = 0;  // stage of the step that is promoted
#pragma unroll
    for (u32 i = 0; i < kAllSteps + kAhead; ++i) {
        if (i < kAllSteps) {
            const u32 m = i % kSteps;
            if (i == 0) {
                wait_for_stage(p, smem, ring);
            } else if (m == 0) {
                wait_in_flight(p, &smem.full[ring.stage], ring.stage, ring.parity());
            }
            if (m == 0) {
                if (!kSplitTokens) fence_async_shared();  // cp.async wrote the token rows in the generic proxy
                weights = at.weights + ring.stage * descriptor_step(kWeightTileBytes);
                tokens = at.tokens + ring.stage * descriptor_step(kTokenTileBytes);
                // ptxas sees by itself that they are in prefill: S1 2048 and 8192 -0.3 % (H200, 2026-12-01).
                if constexpr (!kSplitTokens) {
                    weights = make_uniform(weights);
                    tokens = make_uniform(tokens);
                }
                promotion.load(smem, ring.stage, at);
            }
            if (kHasExtra && m == kFirstExtra) extra_promotion.load(smem, ring.stage, find_extra_operands(at));
            float (&own)[N / 2] = partial[i % (kAhead + 1)];
            if (m < kBlocks) hold_accumulators(own);
            if (is_among(m, kFirstExtra, kExtraBlocks)) hold_accumulators(extra_partial);
            wgmma_fence();
            if (m < kBlocks) {
                const u32 block = weights + m * descriptor_step(64 * kBlockKBytes);
                multiply_block(own, kTokenRows ? tokens : block, kTokenRows ? block : tokens);
            }
            if (is_among(m, kFirstExtra, kExtraBlocks)) {
                const Operands extra_at = find_extra_operands(at);
                const u32 block = extra_at.weights + (m - kFirstExtra) * descriptor_step(64 * kBlockKBytes);
                multiply_block(extra_partial, block + ring.stage * descriptor_step(kWeightTileBytes),
                               extra_at.tokens + ring.stage * descriptor_step(kTokenTileBytes));
            }
            wgmma_commit();
        }
        if (kAhead == 0) previous = ring.stage;
        if (i + 1 > kAhead) {
            const u32 m = (i - kAhead) % kSteps;
            if (i < kAllSteps) {
                wgmma_wait<kAhead>();
            } else {
                wgmma_wait<0>();
            }
            if (m < kBlocks) {
                float (&done)[N / 2] = partial[(i - kAhead) % (kAhead + 1)];
                hold_accumulators(done);
                if (m == 0) promotion.begin_k_block(at);
                promotion.add(sums.own[m], done, m, at);
            }
            if (is_among(m, kFirstExtra, kExtraBlocks)) {
                const Operands extra_at = find_extra_operands(at);
                if (m == kFirstExtra) extra_promotion.begin_k_block(extra_at);
                hold_accumulators(extra_partial);
                extra_promotion.add(sums.extra[m - kFirstExtra], extra_partial, m - kFirstExtra, extra_at);
            }
            if (m == kSteps - 1) {
                sync_warp();
                if (lane_idx() == 0)
                    arrive(&smem.empty[previous]);  // pairs with role_load and role_gather or role_feed
            }
        }
        if (i < kAllSteps) previous = ring.stage;
        if (i < kAllSteps && i % kSteps == kSteps - 1) ring.advance();
    }
}

template <u32 N, bool kTokenRows, u32 kBlocks>
DEVICE void store(const Params& p, Smem& smem, const Task& task, const Share& share, u32 slot,
                  const RouterWeights<N, kTokenRows>& weights, const u32* pairs, float (&sums)[kBlocks][N / 2]) {
    const u32* used = smem.task_used[slot] + share.first_token;
    if constexpr (kTokenRows) {
        if (task.phase == kGemm1) {
            add_bias<kGemm1>(p, smem, task, share, slot, weights, sums);
            store_mid_rows<N>(p, smem, task, share, weights, sums);
        } else {
            add_bias<kGemm2>(p, smem, task, share, slot, weights, sums);
            store_slices_rows<N>(p, smem, task, share, pairs + share.first_token, used, sums);
        }
    } else {
        if (task.phase == kGemm1) {
            add_bias<kGemm1>(p, smem, task, share, slot, weights, sums);
            store_mid_columns<N>(p, smem, task, share, weights, sums);
        } else {
            add_bias<kGemm2>(p, smem, task, share, slot, weights, sums);
            store_slices_columns<N>(p, smem, task, share, pairs + share.first_token, used, sums);
        }
    }
}

template <u32 N, bool kTokenRows, bool kHasExtra = false>
DEVICE void run_tile(const Params& p, Smem& smem, const Head& head, Ring<kNumStages>& ring, const Task& task,
                     const Share& share, u32 slot) {
    Sums<N, kTokenRows, kHasExtra> sums;
    const Operands at = find_operands<kTokenRows>(smem, task, share);
    RouterWeights<N, kTokenRows> weights;
    if constexpr (!kHasExtra) weights.load(p, task, share, smem.task_rows[slot] + share.first_token);
    if constexpr (kChannelScales) begin_channel_scales<kTokenRows>(p, smem, task, share);
    u32 k = task.k_end - task.k_begin;
    // Ahead of the loop, so that the event begins with a multiply.
    if constexpr (kTrace) wait_for_stage(p, smem, ring);
    trace_begin(p, kEventMma, task.phase);
    if constexpr (kPromotes) {
        constexpr u32 kUnroll = kHasExtra ? 1 : kUnrollK;  // no registers for more
#pragma unroll 1
        for (; k >= kUnroll; k -= kUnroll) multiply<kUnroll>(p, smem, ring, at, sums);
        // Tasks of prefill have all k-blocks, those of decode may be parts.
        constexpr bool kHasRest = !kSplitTokens || kNumKBlocks1 % kUnroll != 0 || kNumKBlocks2 % kUnroll != 0;
        if constexpr (kUnroll > 1 && kHasRest) {
#pragma unroll 1
            for (; k > 0; --k) multiply<1>(p, smem, ring, at, sums);
        }
    } else {
        accumulate(p, smem, ring, at, k, sums);
    }
    trace_begin(p, kEventEpilogue);
    // Read again rather than kept in registers over the main loop.
    const Task same = read_task(smem, slot);
    const Share same_share = find_share(same);
    const u32* pairs = smem.task_rows[slot];
    if constexpr (kChannelScales) end_channel_scales();
    if (!join_parts<N>(p, smem, head, same, slot, sums.own)) return;
    if constexpr (kChannelScales) {
        apply_channel_scales<N, kTokenRows>(smem, same_share, sums.own);
        if constexpr (kHasExtra) {
            apply_channel_scales<kExtraColumns, false>(smem, find_extra_share(same), sums.extra);
        }
        sync_warp();  // before the epilogue writes there
    }
    if constexpr (kHasExtra) weights.load(p, same, same_share, pairs + same_share.first_token);
    // Traced kernels, and MXFP4 on many ranks, have no registers to keep the task over join_parts.
    const Task last = kTrace || (kMxWords > 0 && kNumRanks > 1) ? read_task(smem, slot) : same;
    const Share last_share = kMxWords > 0 && kNumRanks > 1 ? find_share(last) : same_share;
    store<N, kTokenRows>(p, smem, last, last_share, slot, weights, pairs, sums.own);
    if constexpr (kHasExtra) {
        sync_warp();  // the buffers of the warp's own are used again
        const Share extra_share = find_extra_share(same);
        RouterWeights<kExtraColumns, false> extra_weights;
        extra_weights.load(p, same, extra_share, pairs + kBlockTokens);
        store<kExtraColumns, false>(p, smem, same, extra_share, slot, extra_weights, pairs, sums.extra);
    }
}

// As few columns as hold the tokens; prefill has no kernel text to spare for 8. W4A8 in decode, which spends
// instructions on every column of every 32 channels, has 24 too, but not the registers for it on many ranks.
DEVICE void run_task(const Params& p, Smem& smem, const Head& head, Ring<kNumStages>& ring, const Task& task,
                     u32 slot) {
    const Share share = find_share(task);
    if constexpr (kSplitTokens) {
        const bool plain = !has_extra_tokens(task) && has_token_rows(task);
        if (plain) return run_tile<64, true>(p, smem, head, ring, task, share, slot);
    }
    if constexpr (kTileTokens > kBlockTokens) {
        if (has_extra_tokens(task)) return run_tile<64, true, true>(p, smem, head, ring, task, share, slot);
    }
    // Traced kernels of MXFP4 would spill with all widths.
    constexpr u32 kWide = kTrace && kHasChunkScales ? 16 : 32;
    if (task.num_rows > kWide) return run_tile<64, false>(p, smem, head, ring, task, share, slot);
    if constexpr (kHasChunkScales && kQuantizes && kWide > 16 && kNumRanks == 1) {
        const bool fits = task.num_rows > 16 && task.num_rows <= 24;
        if (fits) return run_tile<24, false>(p, smem, head, ring, task, share, slot);
    }
    if (kWide > 16 && task.num_rows > 16) return run_tile<32, false>(p, smem, head, ring, task, share, slot);
    if (kSplitTokens || task.num_rows > 8) return run_tile<16, false>(p, smem, head, ring, task, share, slot);
    return run_tile<8, false>(p, smem, head, ring, task, share, slot);
}

DEVICE void role_math(const Params& p, Smem& smem, const Head& head) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumStages> ring;
    Lists lists;
    for (;; slot.advance()) {
        {
            const Task task = next_task(p, smem, slot);
            if (task.phase == kDone) break;
            trace_task(p, task);
            run_task(p, smem, head, ring, task, slot.stage);
        }
        finish_tile(p, smem, read_task(smem, slot.stage), slot.stage, lists);
        trace_end(p, kEventTask);
        free_task(smem, slot);
    }
    finish_last_tile(p, smem, lists);
}
