// Biases of both GEMMs, bf16 or f32. Those of a tile's weight rows come into Smem::bias with the first k-block of its
// task, as they lie in memory, and are added to the sums of all k-blocks.

// Gate and up, unless interleaved, are two runs of a tile's biases; others are one. Without what is past the end.
DEVICE u32 num_bias_runs(const Task& task) { return task.phase == kGemm1 && kGated && !kInterleaved ? 2 : 1; }

DEVICE u32 bias_run(const Task& task) {
    const u32 end = task.phase == kGemm2 ? kHidden : kW13Rows / num_bias_runs(task);
    const u32 most = kBlockRows / num_bias_runs(task);
    return min_of(most, end - task.tile * most);
}

DEVICE void load_bias(const Params& p, Smem& smem, const Task& task, u32 slot, u64* full) {
    const u8* bias = task.phase == kGemm1 ? p.w13_bias : p.w2_bias;
    bias += task.expert * (task.phase == kGemm1 ? p.w13_bias_stride : p.w2_bias_stride);
    const u32 most = kBlockRows / num_bias_runs(task) * u32(p.bias_bytes);
    for (u32 i = 0; i < num_bias_runs(task); ++i) {
        load_bulk(smem.bias[slot] + i * most, bias + i * kIntermediate * p.bias_bytes + task.tile * most,
                  bias_run(task) * u32(p.bias_bytes), full);
    }
}

// One arrival: the bytes that come with k-block k, of which biases are on their way.
DEVICE void expect_weights(const Params& p, Smem& smem, const Task& task, u32 slot, u32 k, u64* full) {
    const bool is_first = k == task.k_begin;
    const u32 bytes = num_bias_runs(task) * bias_run(task) * u32(p.bias_bytes);
    arrive_expect_bytes(full, kWeightStageBytes + (is_first ? bytes : 0));
    if (is_first) load_bias(p, smem, task, slot, full);
}

// Of one of the tile's weight rows.
template <Phase kPhase>
DEVICE float bias_of_row(u32 bytes, const u8* biases, u32 row) {
    u32 i = row;
    if constexpr (kPhase == kGemm1 && kGated) {  // rows are gate and up in alternating groups of 8
        const u32 channel = row / 16 * 8 + row % 8, half = row / 8 % 2;
        i = kInterleaved ? 2 * channel + half : half * (kBlockRows / 2) + channel;
    }
    return bytes == 2 ? bf16_low(reinterpret_cast<const u16*>(biases)[i]) : reinterpret_cast<const float*>(biases)[i];
}

// Router weights on tokens multiply the sums of GEMM 1, and no bias. Else they, and routed_scaling_factor in any case,
// multiply the bias of GEMM 2 as they do its sums (mid_scale, mid_factor).
template <Phase kPhase, u32 N, bool kTokenRows>
DEVICE void add_bias(const Params& p, const Smem& smem, const Task& task, const Share& share, u32 slot,
                     const RouterWeights<N, kTokenRows>& weights, float (&sums)[kShareBlocks<kTokenRows>][N / 2]) {
    constexpr bool kWeighsSums = kPhase == kGemm1 && kWeightOnInput;
    constexpr u32 kTokens = kTokenRows ? 2 : N / 4;  // of this thread
    float factors[kTokens];
#pragma unroll
    for (u32 i = 0; i < kTokens; ++i) {
        if constexpr (kTokenRows) {
            factors[i] = weights.of[i];
        } else {
            factors[i] = token_weight<N>(weights, i / 2, i % 2);
        }
        if constexpr (kPhase == kGemm2) {
            factors[i] = (kWeightOnInput ? 1.0f : factors[i]) * p.mid_scale_unit * (kQuantizes ? 448.0f : 1.0f);
        }
    }
    // Rows past the end have no bias. Those of down are never stored.
    constexpr bool kIsRagged = kW13Rows % kBlockRows != 0;
    u32 end = kPhase == kGemm1 ? kW13Rows - task.tile * kBlockRows : kBlockRows;
    u32 lane = lane_idx();
    if constexpr (kChannelScales) {  // as in apply_channel_scales
        forget_value(end);
        forget_value(lane);
    }
    const u32 bytes = u32(p.bias_bytes);
    constexpr u32 kGroups = kTokenRows ? N / 8 : 1;  // of 8 or 16 weight rows, in a block of 64
    const u8* biases = smem.bias[slot];
#pragma unroll
    for (u32 m = 0; m < kShareBlocks<kTokenRows>; ++m) {
#pragma unroll
        for (u32 g = 0; g < kGroups; ++g) {
            const u32 first = m * 64 + (kTokenRows ? g * 8 : share.first_row + share.warp * 16);
            if (kIsRagged && first >= end) continue;
            const u32 row = first + (kTokenRows ? lane % 4 * 2 : lane / 4);
            const float two[2] = {bias_of_row<kPhase>(bytes, biases, row),
                                  bias_of_row<kPhase>(bytes, biases, row + (kTokenRows ? 1 : 8))};
            constexpr u32 kSums = N / 2 / kGroups;
#pragma unroll
            for (u32 i = 0; i < kSums; ++i) {  // registers of four: two tokens of two rows each
                const float factor = factors[kTokenRows ? i / 2 : i / 4 * 2 + i % 2];
                const float bias = two[kTokenRows ? i % 2 : i % 4 / 2];
                float& sum = sums[m][g * kSums + i];
                sum = kWeighsSums ? fmaf(sum, factor, bias) : kPhase == kGemm1 ? sum + bias : fmaf(bias, factor, sum);
            }
        }
        sync_warp();  // else all are loaded ahead, for which there are none either
    }
}
