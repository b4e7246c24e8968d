// What becomes of a tile's sums that hold channels by rows and tokens by columns. GEMM 1: the activation,
// then re-quantisation per token and 128 channels, e4m3 rows in Params::mid (mid_bf16.cuh for others). GEMM 2: bf16
// rows in Params::slices, one per routed pair. Memory wants tokens by rows: both transpose through a buffer of the
// warp's own.

// Of `num` 8x8 matrices, as many as one instruction takes, up to `most`, and divide them.
DEVICE constexpr u32 matrices_at_once(u32 num, u32 most) {
    return num % most == 0 ? most : matrices_at_once(num, most / 2);
}

// Largest magnitude of each token over a group of 128 channels, which all warps share or without a gate those of a
// warpgroup: lanes of a warp by shuffles, warps through shared memory.
template <u32 N>
DEVICE void reduce_amax(Smem& smem, const Share& share, float (&amax)[N / 4]) {
    const u32 lane = lane_idx();
    const u32 warp = share.group * 4 + share.warp;
#pragma unroll
    for (u32 i = 0; i < N / 4; ++i) {
#pragma unroll
        for (u32 mask = 4; mask < 32; mask *= 2) amax[i] = fmaxf(amax[i], __shfl_xor_sync(kFullMask, amax[i], mask));
    }
    if (lane < 4) {
#pragma unroll
        for (u32 j = 0; j < N / 8; ++j) {
            *reinterpret_cast<float2*>(&smem.amax[warp][j * 8 + lane * 2]) = make_float2(amax[2 * j], amax[2 * j + 1]);
        }
    }
    sync_math();
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j) {
        for (u32 w = 0; w < kNumMathWarps / kTileGroups; ++w) {
            const u32 from = kGated ? w : share.group * 4 + w;
            const float2 other = *reinterpret_cast<const float2*>(&smem.amax[from][j * 8 + lane % 4 * 2]);
            amax[2 * j] = fmaxf(amax[2 * j], other.x);
            amax[2 * j + 1] = fmaxf(amax[2 * j + 1], other.y);
        }
    }
    sync_math();  // before the next tile's are written
}

template <u32 N>
DEVICE void store_mid_scales(const Params& p, const Task& task, const Share& share,
                             const RouterWeights<N, false>& weights, const float (&amax)[N / 4]) {
    if (kGated && share.group != 0) return;
    const u32 lane = lane_idx();
    const u32 group = kGated ? task.tile : task.tile * kTileGroups + share.group;
#pragma unroll
    for (u32 j = 0; j < N / 8; ++j) {
        if (share.warp != j % 4) continue;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 token = j * 8 + lane % 4 * 2 + i;
            const float weight = token_weight<N>(weights, j, i);
            if (lane >= 4 || token >= share.num_tokens) continue;
            const u32 row = task.row_start + share.first_token + token;
            p.mid_scale[u64(group) * p.row_capacity + row] = mid_scale(p, amax[2 * j + i], weight);
        }
    }
}

template <u32 N>
DEVICE void store_mid_columns(const Params& p, Smem& smem, const Task& task, const Share& share,
                              const RouterWeights<N, false>& weights, float (&sums)[kShareBlocks<false>][N / 2]) {
    const u32 lane = lane_idx();
    float amax[N / 4] = {}, token_weights[N / 4] = {};
    if constexpr (kWeightOnInput) {
#pragma unroll
        for (u32 i = 0; i < N / 4; ++i) token_weights[i] = token_weight<N>(weights, i / 2, i % 2);
    }
#pragma unroll
    for (u32 m = 0; m < kShareBlocks<false>; ++m) {
#pragma unroll
        for (u32 j = 0; j < N / 8; ++j) {
#pragma unroll
            for (u32 i = 0; i < (kGated ? 2 : 4); ++i) {
                // Registers 0, 1 are gate and 2, 3 up of one channel, for two tokens; or of two channels.
                float& value = sums[m][4 * j + i];
                float& most = amax[2 * j + i % 2];
                value = activate(p, value, sums[m][4 * j + 2 + i % 2], token_weights[2 * j + i % 2]);
                most = fmaxf(most, fabsf(value));
            }
        }
    }
    if constexpr (!kQuantizes) return store_mid_bf16(p, smem, task, share, weights, sums);
    reduce_amax<N>(smem, share, amax);
    if constexpr (!kGated) {
        if (!has_group(task, share.group)) return;
    }
    store_mid_scales<N>(p, task, share, weights, amax);
#pragma unroll
    for (u32 i = 0; i < N / 4; ++i) amax[i] = quant_factor(amax[i]);

    // A 16-bit element is two tokens of a channel. Matrix j has 8 channels by rows, and by columns four token pairs of
    // `low` and `high`, alternating: these are the warp's two row blocks, or without a gate both halves of one. Its
    // transpose has 8 channels of a token pair in each 16-byte row.
    static_assert(kShareBlocks<false> == 2, "a warpgroup has two row blocks");
    u8* buffer = smem.transpose[share.group * 4 + share.warp];
    u8* mid = p.mid + u64(task.row_start + share.first_token) * kMidStride + task.tile * kTileChannels;
    constexpr u32 kGroup = matrices_at_once(N / 8, 4);
#pragma unroll
    for (u32 block = 0; block < kTileGroups; ++block) {
        if (block > 0) sync_warp();  // all lanes are done with the row block before
        const float* low = sums[block];
        const float* high = kGated ? sums[1] : low + 2;
#pragma unroll
        for (u32 j = 0; j < N / 8; j += kGroup) {
            u32 matrices[kGroup];
#pragma unroll
            for (u32 i = 0; i < kGroup; ++i) {
                const u32 r = (j + i) * 4, t = (j + i) * 2;
                matrices[i] = pack_e4m3(low[r] * amax[t], low[r + 1] * amax[t + 1]) |
                              pack_e4m3(high[r] * amax[t], high[r + 1] * amax[t + 1]) << 16;
            }
            store_matrices_transposed(buffer + j * 128 + lane * 16, matrices);
        }
        sync_warp();
#pragma unroll
        for (u32 row = lane; row < N; row += kWarpThreads) {
            const uint4 v = *reinterpret_cast<const uint4*>(buffer + row * 16);
            const u32 token = row / 8 * 8 + row % 8 / 2 * 2;
            const u32 channel = first_channel(share, kGated ? row % 2 : block, row % 2);
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const u32 selector = i == 0 ? 0x6420 : 0x7531;
                if (token + i >= share.num_tokens) continue;
                store_channels(mid + u64(token + i) * kMidStride, channel,
                               make_uint2(permute_bytes(v.x, v.y, selector), permute_bytes(v.z, v.w, selector)));
            }
        }
    }
}

template <u32 N>
DEVICE void store_slices_columns(const Params& p, Smem& smem, const Task& task, const Share& share, const u32* pairs,
                                 const u32* used, const float (&sums)[kShareBlocks<false>][N / 2]) {
    constexpr u32 kTokens = min_of(N, 32u);  // of one pass
    const u32 lane = lane_idx();
    u8* buffer = smem.transpose[share.group * 4 + share.warp];
#pragma unroll
    for (u32 m = 0; m < kShareBlocks<false>; ++m) {
        const u32 channel = task.tile * kBlockRows + share.first_row + m * 64 + share.warp * 16;
#pragma unroll
        for (u32 first = 0; first < N; first += kTokens) {
            // Matrix (j, half) is 8 channels by 8 tokens; the buffer is [half][token][8 channels].
            constexpr u32 kGroup = matrices_at_once(kTokens / 8, 2);
#pragma unroll
            for (u32 j = 0; j < kTokens / 8; j += kGroup) {
                u32 matrices[2 * kGroup];
#pragma unroll
                for (u32 i = 0; i < kGroup; ++i) {
                    const u32 r = (first / 8 + j + i) * 4;
                    matrices[2 * i] = pack_bf16(sums[m][r], sums[m][r + 1]);
                    matrices[2 * i + 1] = pack_bf16(sums[m][r + 2], sums[m][r + 3]);
                }
                const u32 half = lane / 8 % 2, token = (j + lane / 16 % kGroup) * 8 + lane % 8;
                store_matrices_transposed(buffer + (half * kTokens + token) * 16, matrices);
            }
            sync_warp();
#pragma unroll
            for (u32 i = lane; i < kTokens * 2; i += kWarpThreads) {
                const u32 token = first + i / 2, half = i % 2;
                if (token >= share.num_tokens || channel >= kHidden) continue;
                *reinterpret_cast<uint4*>(slice_of_pair(p, pairs[token], used[token]) + channel + half * 8) =
                    *reinterpret_cast<const uint4*>(buffer + (half * kTokens + i / 2) * 16);
            }
            sync_warp();
        }
    }
}
