// The main loop of MXFP4 weights and bf16 tokens. A code times its scale is a bf16 number, so the tensor cores add up
// the whole tile in its sums.

// The exponent and mantissa bits of e2m1 at bit 6 are a bf16 number 2^-126 as large, subnormals too. Packed scales are
// 2^66 as large, so that the weights stay normal for scales from 2^-65 on, and the sums make up for the rest.
constexpr float kWeightUnit = 1152921504606846976.0f;  // 2^60

// Codes kFirst, which is 0 or 1, and kFirst + 4 of a word, times `scale`. One multiplication moves both to where their
// signs are wanted and to where the rest is: the copies do not meet.
template <u32 kFirst>
DEVICE u32 expand_codes(u32 codes, u32 scale) {
    constexpr u32 kToSign = 1u << (12 - 4 * kFirst), kToRest = 1u << (6 - 4 * kFirst);
    const u32 moved = (codes & 0x000f000fu << 4 * kFirst) * (kToSign + kToRest);
    return multiply_bf16x2(moved & 0x81c081c0u, scale);
}

// Words of four scales, of the chunks of a k-block: of both rows in the first block of 64, then in the second
// (jitmoe/mxfp4.py).
DEVICE uint4 chunk_scales(const Smem& smem, u32 stage, u32 first_row) {
    const u32 warp = first_row / 32 + warp_idx() % 4;
    return *reinterpret_cast<const uint4*>(smem.weight_scales[stage] + (warp * 8 + lane_idx() / 4) * 16);
}

// Scale number c of a word as a pair of bf16.
DEVICE u32 scale_of_chunk(u32 scales, u32 c) { return permute_bytes(scales, 0, 0x4040 + c * 0x0101) << 7; }

// Chunks whose multiplies are waited for together, as registers allow.
template <u32 kSums>
constexpr u32 kGroupChunks = kSums <= 16 ? 4 : 2;

// The operands of two multiplies a chunk.
template <u32 kGroup>
DEVICE void expand_group(const u32 (&words)[kGroup][2], const u32 (&scales)[2], u32 first, u32 (&a)[kGroup][2][4]) {
#pragma unroll
    for (u32 i = 0; i < kGroup * 2; ++i) {
        const u32 c = i / 2, half = i % 2, scale = scale_of_chunk(scales[half], first + c);
        const u32 low = words[c][half], high = low >> 8;
        a[c][0][half] = expand_codes<0>(low, scale);
        a[c][0][half + 2] = expand_codes<1>(low, scale);
        a[c][1][half] = expand_codes<0>(high, scale);
        a[c][1][half + 2] = expand_codes<1>(high, scale);
    }
#pragma unroll
    for (u32 i = 0; i < kGroup * 2; ++i) hold_operands(a[i / 2][i % 2]);
}

// Operands of a group are worked out under the multiplies before. Nothing is in flight from k-block to k-block, else
// ptxas takes it that operands change under multiplies and serialises these (C7513).
template <typename At, typename AllSums>
DEVICE void accumulate(const Params& p, Smem& smem, Ring<kNumStages>& ring, const At& at, u32 num, AllSums& sums) {
    constexpr u32 kHalfTile = kTileTokens * kBlockKBytes;  // 64 channels of all tokens
    constexpr u32 kGroup = kGroupChunks<sizeof(sums.own[0]) / sizeof(float)>;
    constexpr u32 kGroups = AllSums::kBlocks * kChunks / kGroup;
    const PackedRows packed = find_packed_rows(smem, at.first_row);
#pragma unroll 1
    for (u32 k = 0; k < num; ++k, ring.advance()) {
        u32 codes[2][kGroup][2][4];
        u32 words[kGroup][2];
        wait_in_flight(p, &smem.full[ring.stage], ring.stage, ring.parity());
        fence_async_shared();  // cp.async wrote the token rows in the generic proxy
        packed.load(ring.stage, 0, 0, words);
        const uint4 scales = chunk_scales(smem, ring.stage, at.first_row);
        const u32 tokens = make_uniform(at.tokens + ring.stage * descriptor_step(kTokenTileBytes));
#pragma unroll
        for (u32 i = 0; i < kGroups; ++i) {
            // Blocks take turns.
            const u32 m = i % AllSums::kBlocks, first = i / AllSums::kBlocks * kGroup;
            const u32 rows[2] = {m == 0 ? scales.x : scales.z, m == 0 ? scales.y : scales.w};
            expand_group(words, rows, first, codes[i % 2]);
            if (i + 1 < kGroups) {
                const u32 next = i + 1;
                packed.load(ring.stage, next % AllSums::kBlocks, next / AllSums::kBlocks * kGroup, words);
            }
            wgmma_fence();
#pragma unroll
            for (u32 c = 0; c < kGroup; ++c) {
                const u32 columns = tokens + descriptor_step((first + c) / 2 * kHalfTile + (first + c) % 2 * 64);
                wgmma_registers<true, 0>(sums.own[m], codes[i % 2][c][0], columns);
                wgmma_registers<true, descriptor_step(32)>(sums.own[m], codes[i % 2][c][1], columns);
            }
            wgmma_commit();
            if (i + 1 < kGroups) {
                wgmma_wait<1>();  // the operands before these may change
            } else {
                wgmma_wait<0>();
            }
        }
        sync_warp();
        if (lane_idx() == 0) arrive(&smem.empty[ring.stage]);  // pairs with role_load and role_gather
    }
#pragma unroll
    for (u32 m = 0; m < AllSums::kBlocks; ++m) {
        hold_accumulators(sums.own[m]);
#pragma unroll
        for (float& sum : sums.own[m]) sum *= kWeightUnit;
    }
}
