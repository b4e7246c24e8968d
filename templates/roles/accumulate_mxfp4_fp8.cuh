// The main loop of MXFP4 weights and e4m3 tokens. A multiply is 32 deep, as a weight's scale reaches: its partial sums
// times the scales of the two rows are added up over the k-block, and that times the tokens' scales to the sums.

// Eight codes of a row: the even ones for the first 16 channels of a multiply, the odd ones for the others. The
// exponent and mantissa bits of e2m1, two places up, are an e4m3 number 2^-6 as large, subnormals too.
DEVICE void expand_codes(u32 codes, u32& even, u32& odd) {
    even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1c1c1c1cu);
    odd = (codes & 0x80808080u) | (codes >> 2 & 0x1c1c1c1cu);
}

// Exponents of the chunks of the lane's two rows of block m, four bits each: the first row's in the low half
// (jitmoe/mxfp4.py).
DEVICE u32 chunk_exponents(const Smem& smem, u32 stage, u32 first_row, u32 m) {
    const u32 row = first_row + m * 64 + lane_idx() / 4, pair = warp_idx() % 4;
    return *reinterpret_cast<const u32*>(smem.weight_scales[stage] + (row / 64 * 8 + row % 8) * 16 + pair * 4);
}

// 2^(1 + exponent), of the chunk at this bit.
DEVICE float scale_of_chunk(u32 exponents, u32 bit) {
    const u32 exponent = bit <= 23 ? exponents << (23 - bit) : exponents >> (bit - 23);
    return __uint_as_float((exponent & 15u << 23) | 128u << 23);
}

// What sums are times a row's scale: codes are 2^-12 as large as that is for, chunks 2^(1 + 12).
constexpr float kWeightUnit = 0.5f;

// The multiplies of a k-block: of each block of 64 rows and chunk in turn, 64 columns in two pieces, for partial sums
// of all would leave no registers for a multiply in flight. Some are waited for together, as registers allow.
template <u32 kSums>
struct Steps {
    static constexpr u32 kPieces = kSums == 32 ? 2 : 1, kPiece = kSums / kPieces;
    static constexpr u32 kNum = kSums <= 8 ? kChunks : 1;  // chunks of a step
};

// Chunks number `first` .. of a k-block, of both rows.
template <u32 kNum>
DEVICE void load_chunks(const PackedRows& packed, u32 stage, u32 first, u32 (&words)[kNum][2]) {
#pragma unroll
    for (u32 i = 0; i < kNum * 2; ++i) {
        words[i / 2][i % 2] = packed.codes(stage, (first + i / 2) / kChunks, i % 2, (first + i / 2) % kChunks);
    }
}

template <u32 kNum>
DEVICE void expand_chunks(const u32 (&words)[kNum][2], u32 (&codes)[kNum][4]) {
#pragma unroll
    for (u32 i = 0; i < kNum * 2; ++i) {
        expand_codes(words[i / 2][i % 2], codes[i / 2][i % 2], codes[i / 2][i % 2 + 2]);
    }
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) hold_operands(codes[i]);
}

template <u32 kNum, u32 kPiece>
DEVICE void start_step(u32 tokens, u32 first, const u32 (&codes)[kNum][4], float (&partial)[kNum][kPiece]) {
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) hold_accumulators(partial[i]);
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        wgmma_registers<false, 0>(partial[i], codes[i], tokens + (first + i) % kChunks * descriptor_step(32));
    }
    wgmma_commit();
}

// Partial sums of a step into those of the k-block from `column` on, and a whole one's to the sums.
template <u32 kNum, u32 kPiece, u32 kSums>
DEVICE void promote_step(u32 first, u32 column, const u32 (&exponents)[2], const float* token_scales,
                         float (&partial)[kNum][kPiece], float (&block)[kSums], float (&sums)[kSums]) {
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        hold_accumulators(partial[i]);
        const u32 m = (first + i) / kChunks, c = (first + i) % kChunks;
        const float low = scale_of_chunk(exponents[m], 4 * c), high = scale_of_chunk(exponents[m], 16 + 4 * c);
#pragma unroll
        for (u32 n = 0; n < kPiece; ++n) {
            const float scale = n % 4 < 2 ? low : high;
            float& sum = block[column + n];
            sum = c == 0 ? partial[i][n] * scale : fmaf(partial[i][n], scale, sum);
            if (c + 1 == kChunks) {
                sums[column + n] = fmaf(sum, token_scales[(column + n) / 4 * 8 + n % 2], sums[column + n]);
            }
        }
    }
}

template <typename At, typename AllSums>
DEVICE void accumulate(const Params& p, Smem& smem, Ring<kNumStages>& ring, const At& at, u32 num, AllSums& sums) {
    constexpr u32 kSums = sizeof(sums.own[0]) / sizeof(float);
    constexpr u32 kPieces = Steps<kSums>::kPieces, kPiece = Steps<kSums>::kPiece, kNum = Steps<kSums>::kNum;
    constexpr u32 kSteps = AllSums::kBlocks * kChunks / kNum * kPieces;
    // Steps in flight while one is promoted, and codes loaded ahead: beside stamps there are registers for less. Two
    // accumulators take turns all the same: where two multiplies of the same weights had one, ptxas dropped the first
    // (NVRTC 12.9 and 13.0).
    constexpr u32 kAhead = kTrace && kSums > 16 ? 0 : 1;
    constexpr bool kLoadsAhead = kSums <= 8 && !kTrace;
    const PackedRows packed = find_packed_rows(smem, at.first_row);
#pragma unroll 1
    for (u32 k = 0; k < num; ++k, ring.advance()) {
        float partial[2][kNum][kPiece], block[kSums];
        u32 words[kNum][2], codes[2][kNum][4];
        wait_in_flight(p, &smem.full[ring.stage], ring.stage, ring.parity());
        fence_async_shared();  // cp.async wrote the token rows in the generic proxy
        const u32 exponents[2] = {chunk_exponents(smem, ring.stage, at.first_row, 0),
                                  chunk_exponents(smem, ring.stage, at.first_row, 1)};
        const u32 tokens = make_uniform(at.tokens + ring.stage * descriptor_step(kTokenTileBytes));
        const float* token_scales = smem.token_scales[ring.stage] + at.first_token;
#pragma unroll
        for (u32 i = 0; i < kSteps + kAhead; ++i) {
            if (i < kSteps) {
                const u32 first = i / kPieces * kNum, piece = i % kPieces;
                u32(&a)[kNum][4] = codes[i / kPieces % 2];
                if (piece == 0) {
                    if (!kLoadsAhead || i == 0) load_chunks(packed, ring.stage, first, words);
                    expand_chunks(words, a);
                }
                start_step(tokens + piece * descriptor_step(2 * kPiece * kBlockKBytes), first, a, partial[i % 2]);
                if (kLoadsAhead && i + 1 < kSteps) load_chunks(packed, ring.stage, first + kNum, words);
            }
            if (i + 1 <= kAhead) continue;
            if (i < kSteps) {
                wgmma_wait<kAhead>();
            } else {
                wgmma_wait<0>();
            }
            const u32 done = i - kAhead, first = done / kPieces * kNum;
            promote_step(first, done % kPieces * kPiece, exponents, token_scales, partial[done % 2], block,
                         sums.own[first / kChunks]);
        }
        sync_warp();
        if (lane_idx() == 0) arrive(&smem.empty[ring.stage]);  // pairs with role_load and role_gather
    }
#pragma unroll
    for (u32 m = 0; m < AllSums::kBlocks; ++m) {
#pragma unroll
        for (float& sum : sums.own[m]) sum *= kWeightUnit;
    }
}
