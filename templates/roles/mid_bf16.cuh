// What is between the GEMMs as bf16 rows in Params::mid. `sums` hold it in place of gate; see the epilogues.

// What multiplies a row before it is rounded: so nothing is left to do after GEMM 2, and the rounding is as good.
DEVICE float mid_factor(const Params& p, float weight) {
    return kWeightOnInput ? p.mid_scale_unit : p.mid_scale_unit * weight;
}

DEVICE u8* mid_row(const Params& p, const Task& task, u32 token) {
    return p.mid + (u64(task.row_start + token) * kMidStride + task.tile * kTileChannels) * kElementBytes;
}

// Tokens as columns. Matrix j has 8 channels of a row block by 8 tokens; its transpose goes to 16 bytes of each token.
template <u32 N>
DEVICE void store_mid_bf16(const Params& p, Smem& smem, const Task& task, const Share& share,
                           const RouterWeights<N, false>& weights, const float (&sums)[kShareBlocks<false>][N / 2]) {
    const u32 lane = lane_idx();
    float factors[N / 4];
#pragma unroll
    for (u32 i = 0; i < N / 4; ++i) factors[i] = mid_factor(p, token_weight<N>(weights, i / 2, i % 2));
    if constexpr (!kGated) {
        if (!has_group(task, share.group)) return;
    }
    u8* buffer = smem.transpose[share.group * 4 + share.warp];
    constexpr u32 kEights = kGated ? 1 : 2;  // times 8 channels in a row block of the warp
#pragma unroll
    for (u32 m = 0; m < kShareBlocks<false> * kEights; ++m) {
        const u32 block = m / kEights, half = m % kEights;
        constexpr u32 kGroup = min_of(N / 8, 4u);
#pragma unroll
        for (u32 j = 0; j < N / 8; j += kGroup) {
            u32 matrices[kGroup];
#pragma unroll
            for (u32 i = 0; i < kGroup; ++i) {
                const float* two = sums[block] + (j + i) * 4 + half * 2;
                const float* by = factors + (j + i) * 2;
                matrices[i] = pack_bf16(two[0] * by[0], two[1] * by[1]);
            }
            store_matrices_transposed(buffer + j * 128 + lane * 16, matrices);
        }
        sync_warp();
        const u32 channel = first_channel(share, block, half);
#pragma unroll
        for (u32 token = lane; token < N; token += kWarpThreads) {
            if (token >= share.num_tokens) continue;
            store_channels(mid_row(p, task, share.first_token + token), channel,
                           *reinterpret_cast<const uint4*>(buffer + token * 16));
        }
        sync_warp();
    }
}

// Tokens as rows, a group of 128 channels of the tile. Two chunks of 64 columns, or without a gate one, hold 64
// channels of the warp's 16 tokens: 128 bytes of each.
template <u32 N>
DEVICE void store_mid_bf16(const Params& p, Smem& smem, const Task& task, const Share& share,
                           const RouterWeights<N, true>& weights, u32 tile_group,
                           const float (&sums)[kShareBlocks<true>][N / 2]) {
    const u32 lane = lane_idx();
    const float factors[2] = {mid_factor(p, weights.of[0]), mid_factor(p, weights.of[1])};
    u8* buffer = smem.transpose[share.group * 4 + share.warp];
#pragma unroll
    for (u32 first = tile_group * 128; first < tile_group * 128 + 128; first += 64) {
        // Matrix (group, half) is 8 tokens by 8 channels.
#pragma unroll
        for (u32 group = 0; group < 8; group += 2) {
            u32 matrices[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float* two = sums_of_channels<N>(sums, first / 8 + group + i / 2) + i % 2 * 2;
                matrices[i] = pack_bf16(two[0] * factors[i % 2], two[1] * factors[i % 2]);
            }
            store_matrices(buffer + swizzle_128(lane % 16, group + lane / 16), matrices);
        }
        sync_warp();
#pragma unroll
        for (u32 row = lane / 8; row < 16; row += 4) {
            const u32 token = share.warp * 16 + row;
            if (token >= share.num_tokens) continue;
            const u32 row_of_tile = share.first_token + token;
            *reinterpret_cast<uint4*>(mid_row(p, task, row_of_tile) + first * kElementBytes + lane % 8 * 16) =
                *reinterpret_cast<const uint4*>(buffer + swizzle_128(row, lane % 8));
        }
        sync_warp();
    }
}
