// What becomes of a warpgroup's sums that hold its tokens by rows and channels by columns. GEMM 1: the
// activation, then re-quantisation per token and 128 channels, e4m3 rows in Params::mid. GEMM 2: bf16 rows in
// Params::slices, one per routed pair. A warp holds all channels of 16 tokens, so it needs no other warp; 16-byte
// pieces of rows are put together in a buffer of its own, which is free again: the main loop has a __syncwarp in every
// k-block.

// Scales and codes of a group of 128 channels of the tile, whose sums the activation has been through. `amax` is that
// of this lane's sums, for the two rows.
template <u32 N>
DEVICE void store_group(const Params& p, Smem& smem, const Task& task, const Share& share,
                        const RouterWeights<N, true>& weights, u32 group, float (&amax)[2],
                        const float (&sums)[kShareBlocks<true>][N / 2]) {
    const u32 lane = lane_idx(), first_group = task.tile * kTileGroups;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        amax[half] = fmaxf(amax[half], __shfl_xor_sync(kFullMask, amax[half], 1));
        amax[half] = fmaxf(amax[half], __shfl_xor_sync(kFullMask, amax[half], 2));
        const u32 token = share.warp * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && token < share.num_tokens) {
            const u32 row = task.row_start + share.first_token + token;
            p.mid_scale[u64(first_group + group) * p.row_capacity + row] = mid_scale(p, amax[half], weights.of[half]);
        }
        amax[half] = quant_factor(amax[half]);
    }

    // A 16-bit element is two channels of a token. The columns of matrix (half, k) alternate between two times 8
    // channels, so each of its 16-byte rows is 16 channels in an order that two permutations undo.
    u8* buffer = smem.transpose[share.group * 4 + share.warp];
    if (group > 0) sync_warp();  // all lanes are done with the group before
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 matrices[4];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
            for (u32 k = 0; k < 2; ++k) {
                const u32 eight = group * 16 + i * 4 + k * 2;
                const float* even = sums_of_channels<N>(sums, eight) + half * 2;
                const float* odd = sums_of_channels<N>(sums, eight + 1) + half * 2;
                matrices[half * 2 + k] = pack_e4m3(even[0] * amax[half], even[1] * amax[half]) |
                                         pack_e4m3(odd[0] * amax[half], odd[1] * amax[half]) << 16;
            }
        }
        store_matrices(buffer + swizzle_128(lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2), matrices);
    }
    sync_warp();
    u8* mid = p.mid + u64(task.row_start + share.first_token) * kMidStride + (first_group + group) * 128;
#pragma unroll
    for (u32 row = lane / 8; row < 16; row += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(buffer + swizzle_128(row, lane % 8));
        const u32 token = share.warp * 16 + row;
        if (token >= share.num_tokens) continue;
        *reinterpret_cast<uint4*>(mid + u64(token) * kMidStride + lane % 8 * 16) =
            make_uint4(permute_bytes(v.x, v.y, 0x5410), permute_bytes(v.z, v.w, 0x5410),
                       permute_bytes(v.x, v.y, 0x7632), permute_bytes(v.z, v.w, 0x7632));
    }
}

// Rows lane / 4 and + 8 of the warp's 16 tokens. Columns of a 64-wide chunk are gate and up in alternating groups of 8:
// registers 8i .. 8i+3 are gate and 8i+4 .. 8i+7 up of two channels, for the two rows. Without a gate they are four
// channels.
template <u32 N>
DEVICE void store_mid_rows(const Params& p, Smem& smem, const Task& task, const Share& share,
                           const RouterWeights<N, true>& weights, float (&sums)[kShareBlocks<true>][N / 2]) {
    constexpr u32 kBlocks = kShareBlocks<true> / kTileGroups;  // of a group
#pragma unroll
    for (u32 group = 0; group < kTileGroups; ++group) {
        if constexpr (!kGated) {
            if (!has_group(task, group)) break;
        }
        float amax[2] = {};
#pragma unroll
        for (u32 m = group * kBlocks; m < (group + 1) * kBlocks; ++m) {
#pragma unroll
            for (u32 i = 0; i < N / 2; i += 8) {
#pragma unroll
                for (u32 r = 0; r < (kGated ? 4 : 8); ++r) {
                    const u32 row = r % 4 / 2;
                    float& value = sums[m][i + r];
                    value = activate(p, value, sums[m][i + 4 + r % 4], weights.of[row]);
                    amax[row] = fmaxf(amax[row], fabsf(value));
                }
            }
        }
        if constexpr (kQuantizes) {
            store_group<N>(p, smem, task, share, weights, group, amax, sums);
        } else {
            store_mid_bf16(p, smem, task, share, weights, group, sums);
        }
    }
}

template <u32 N>
DEVICE void store_slices_rows(const Params& p, Smem& smem, const Task& task, const Share& share, const u32* pairs,
                              const float (&sums)[kShareBlocks<true>][N / 2]) {
    const u32 lane = lane_idx();
    u8* buffer = smem.transpose[share.group * 4 + share.warp];
    // Lane l stores 8 channels of rows l / 8, + 4, + 8 and + 12.
    u16* rows[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 token = share.warp * 16 + i * 4 + lane / 8;
        rows[i] = token < share.num_tokens ? slice_of_pair(p, pairs[token]) + lane % 8 * 8 : nullptr;
    }
#pragma unroll
    for (u32 m = 0; m < kShareBlocks<true>; ++m) {
        // Matrix (j, half) is 8 tokens by the 8 channels of group j.
#pragma unroll
        for (u32 j = 0; j < N / 8; j += 2) {
            u32 matrices[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float* two = sums[m] + (j + i / 2) * 4 + i % 2 * 2;
                matrices[i] = pack_bf16(two[0], two[1]);
            }
            store_matrices(buffer + swizzle_128(lane % 16, j + lane / 16), matrices);
        }
        sync_warp();
        const u32 channel = task.tile * kBlockRows + m * 64;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (rows[i] == nullptr || channel + lane % 8 * 8 >= kHidden) continue;
            *reinterpret_cast<uint4*>(rows[i] + channel) =
                *reinterpret_cast<const uint4*>(buffer + swizzle_128(i * 4 + lane / 8, lane % 8));
        }
        sync_warp();
    }
}
