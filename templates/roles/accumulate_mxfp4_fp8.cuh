// The main loop of MXFP4 weights and e4m3 tokens. A multiply is 32 deep, as a weight's scale reaches: its partial sums
// times the scales of the two rows are added up over the k-block, and that times the tokens' scales to the sums.

// Eight codes of a row: the even ones for the first 16 channels of a multiply, the odd ones for the others. The exponent
// and mantissa bits of e2m1, two places up, are an e4m3 number 2^-6 as large, subnormals too; packed scales make up for
// it.
DEVICE void expand_codes(u32 codes, u32& even, u32& odd) {
    even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1c1c1c1cu);
    odd = (codes & 0x80808080u) | (codes >> 2 & 0x1c1c1c1cu);
}

// Scale number c of a word.
DEVICE float scale_of_chunk(u32 scales, u32 c) {
    return __uint_as_float((c < 3 ? scales << (23 - 8 * c) : scales >> 1) & 0x7f800000u);
}

// Multiplies that are waited for together, of so many sums each: as registers allow.
template <u32 kSums>
constexpr u32 kGroup = kSums <= 8    ? kChunks
                       : kSums == 16 ? kChunks / 2
                                     : 1;

// Multiplies number `first` .. of a k-block: of block first / kChunks and its chunks in turn.
template <u32 kNum>
DEVICE void load_group(const PackedRows& packed, u32 stage, u32 first, u32 (&words)[kNum][2]) {
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        const u32 m = (first + i) / kChunks, c = (first + i) % kChunks;
        words[i][0] = packed.codes(stage, m, 0, c);
        words[i][1] = packed.codes(stage, m, 1, c);
    }
}

template <u32 kNum, u32 kSums>
DEVICE void start_group(u32 tokens, u32 first, const u32 (&words)[kNum][2], u32 (&codes)[kNum][4],
                        float (&partial)[kNum][kSums]) {
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        expand_codes(words[i][0], codes[i][0], codes[i][2]);
        expand_codes(words[i][1], codes[i][1], codes[i][3]);
    }
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        hold_operands(codes[i]);
        hold_accumulators(partial[i]);
    }
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        wgmma_registers<false, 0>(partial[i], codes[i], tokens + (first + i) % kChunks * descriptor_step(32));
    }
    wgmma_commit();
}

// Their partial sums into those of the k-block, and a whole one's to the sums.
template <u32 kNum, u32 kSums>
DEVICE void promote_group(u32 first, const uint4& scales, const float* token_scales, float (&partial)[kNum][kSums],
                          float (&block)[kSums], float (&sums)[kSums]) {
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        hold_accumulators(partial[i]);
        const u32 m = (first + i) / kChunks, c = (first + i) % kChunks;
        const float low = scale_of_chunk(m == 0 ? scales.x : scales.z, c);
        const float high = scale_of_chunk(m == 0 ? scales.y : scales.w, c);
#pragma unroll
        for (u32 n = 0; n < kSums; ++n) {
            const float scale = n % 4 < 2 ? low : high, x = token_scales[n / 4 * 8 + n % 2];
            block[n] = c == 0 ? partial[i][n] * scale : fmaf(partial[i][n], scale, block[n]);
            if (c + 1 == kChunks) sums[n] = fmaf(block[n], x, sums[n]);
        }
    }
}

template <typename At, typename AllSums>
DEVICE void accumulate(const Params& p, Smem& smem, Ring<kNumStages>& ring, const At& at, u32 num, AllSums& sums) {
    constexpr u32 kSums = sizeof(sums.own[0]) / sizeof(float), kNum = kGroup<kSums>;
    constexpr u32 kGroups = AllSums::kBlocks * kChunks / kNum;
    constexpr u32 kAhead = kSums <= 16 ? 1 : 0;  // groups in flight while one is promoted
    constexpr bool kLoadsAhead = kSums <= 8;     // codes of the next group, under the multiplies of this
    const PackedRows packed = find_packed_rows(smem, at.first_row);
#pragma unroll 1
    for (u32 k = 0; k < num; ++k, ring.advance()) {
        float partial[kAhead + 1][kNum][kSums], block[kSums];
        u32 words[kNum][2], codes[kAhead + 1][kNum][4];
        wait_in_flight(p, &smem.full[ring.stage], ring.stage, ring.parity());
        fence_async_shared();  // cp.async wrote the token rows in the generic proxy
        const uint4 scales = chunk_scales(smem, ring.stage, at.first_row);
        const u32 tokens = make_uniform(at.tokens + ring.stage * descriptor_step(kTokenTileBytes));
#pragma unroll
        for (u32 i = 0; i < kGroups + kAhead; ++i) {
            if (i < kGroups) {
                constexpr u32 kSlots = kAhead + 1;
                if (!kLoadsAhead || i == 0) load_group(packed, ring.stage, i * kNum, words);
                start_group(tokens, i * kNum, words, codes[i % kSlots], partial[i % kSlots]);
                if (kLoadsAhead && i + 1 < kGroups) load_group(packed, ring.stage, (i + 1) * kNum, words);
            }
            if (i + 1 <= kAhead) continue;
            if (i < kGroups) {
                wgmma_wait<kAhead>();
            } else {
                wgmma_wait<0>();
            }
            const u32 done = i - kAhead;
            promote_group(done * kNum, scales, smem.token_scales[ring.stage] + at.first_token,
                          partial[done % (kAhead + 1)], block, sums.own[done * kNum / kChunks]);
        }
        sync_warp();
        if (lane_idx() == 0) arrive(&smem.empty[ring.stage]);  // pairs with role_load and role_gather
    }
}
