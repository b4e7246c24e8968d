// The main loop of MXFP4 weights and e4m3 tokens. A multiply is 32 deep, as a weight's scale reaches: its partial sums
// times the scales of the two rows are added up over a group of 128 channels, and that times the tokens' scales to the
// sums.

// Eight codes of a row: the even ones for the first 16 channels of a multiply, the odd ones for the others. The
// exponent and mantissa bits of e2m1, two places up, are an e4m3 number 2^-6 as large, subnormals too.
DEVICE void expand_codes(u32 codes, u32& even, u32& odd) {
    even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1c1c1c1cu);
    odd = (codes & 0x80808080u) | (codes >> 2 & 0x1c1c1c1cu);
}

// This lane's exponents of chunks, four bits each: a word has those of a group of channels, of two rows, the first
// row's in the low half (jitmoe/mxfp4.py).
struct Exponents {
    const u8* first;  // in stage 0
    u32 bias;         // of 2^1, in place, which the compiler shall not know: it would mask and add in two steps

    DEVICE u32 load(u32 stage, u32 group, u32 m) const {
        return *reinterpret_cast<const u32*>(first + stage * (kMxWords * 4) + group * (kBlockRows * 2) + m * 128);
    }
    // 2^(1 + exponent), of the chunk at this bit.
    DEVICE float scale(u32 exponents, u32 bit) const {
        const u32 exponent = bit <= 23 ? exponents << (23 - bit) : exponents >> (bit - 23);
        return __uint_as_float((exponent & 15u << 23) | bias);
    }
};

template <u32 kSums, typename P>
DEVICE Exponents find_exponents(const P& p, const Smem& smem, u32 first_row) {
    const u32 row = first_row + lane_idx() / 4;
    const bool is_known = kSums > 16;  // no register for it
    return {smem.weight_scales[0] + (row / 64 * 8 + row % 8) * 16 + warp_idx() % 4 * 4,
            is_known || p.num_tokens < 128u << 23 ? 128u << 23 : 0};
}

// What sums are times a row's scale: codes are 2^-12 as large as that is for, chunks 2^(1 + 12).
constexpr float kWeightUnit = 0.5f;

constexpr u32 kGroupChunks = kChunks / kTokenGroups;             // of which tokens have one scale
constexpr u32 kGroupTileBytes = kTokenTileBytes / kTokenGroups;  // of their channels, all tokens

// A multiply of a k-block, by its number: chunk c of a group of channels, in a block of 64 rows. All chunks of a group
// and block come together.
struct Multiply {
    u32 group, m, c;
};

template <u32 kBlocks>
DEVICE Multiply multiply_number(u32 i) {
    return {i / kGroupChunks / kBlocks, i / kGroupChunks % kBlocks, i % kGroupChunks};
}

// The multiplies of a k-block, some of which are waited for together, as registers allow. 64 columns in two pieces, one
// after the other for every group and block, for partial sums of all would leave no registers for a multiply in flight.
template <u32 kSums>
struct Steps {
    static constexpr u32 kPieces = kSums == 32 ? 2 : 1, kPiece = kSums / kPieces;
    static constexpr u32 kNum = kSums <= 8 && !kTrace ? kGroupChunks : kSums <= 16 ? 2 : 1;  // multiplies of a step
    static constexpr u32 kOfPiece = kGroupChunks / kNum;                                     // steps

    DEVICE static u32 piece(u32 i) { return i / kOfPiece % kPieces; }
    DEVICE static u32 first(u32 i) { return (i / kOfPiece / kPieces * kOfPiece + i % kOfPiece) * kNum; }
};

// Codes of multiplies number `first` .. of a k-block, of both rows.
template <u32 kBlocks, u32 kNum>
DEVICE void load_chunks(const PackedRows& packed, u32 stage, u32 first, u32 (&words)[kNum][2]) {
    const Multiply at = multiply_number<kBlocks>(first);
    packed.load(stage, at.m, at.group * kGroupChunks + at.c, words);
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

// The product with channels of `tokens` from that of multiply `first` on.
template <u32 kBlocks, u32 kNum, u32 kPiece>
DEVICE void start_step(u32 tokens, u32 first, const u32 (&codes)[kNum][4], float (&partial)[kNum][kPiece]) {
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) hold_accumulators(partial[i]);
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        const Multiply at = multiply_number<kBlocks>(first + i);
        const u32 columns = at.group * descriptor_step(kGroupTileBytes) + at.c * descriptor_step(32);
        wgmma_registers<false, 0>(partial[i], codes[i], tokens + columns);
    }
    wgmma_commit();
}

// Partial sums of a step into those of the group from `column` on, and a whole group's to the sums.
template <u32 kGroups, u32 kNum, u32 kPiece, u32 kSums, u32 kBlocks>
DEVICE void promote_step(u32 first, u32 column, const Exponents& exponents, const u32 (&of_rows)[kGroups][kBlocks],
                         const float* token_scales, float (&partial)[kNum][kPiece], float (&group)[kPiece],
                         float (&sums)[kBlocks][kSums]) {
#pragma unroll
    for (u32 i = 0; i < kNum; ++i) {
        hold_accumulators(partial[i]);
        const Multiply at = multiply_number<kBlocks>(first + i);
        const u32 word = of_rows[at.group][at.m];
        const float low = exponents.scale(word, 4 * at.c), high = exponents.scale(word, 16 + 4 * at.c);
        const float* of_tokens = token_scales + at.group * kTileTokens;
#pragma unroll
        for (u32 n = 0; n < kPiece; ++n) {
            const float scale = n % 4 < 2 ? low : high;
            float &in_group = group[n], &sum = sums[at.m][column + n];
            in_group = at.c == 0 ? partial[i][n] * scale : fmaf(partial[i][n], scale, in_group);
            if (at.c + 1 == kGroupChunks) sum = fmaf(in_group, of_tokens[(column + n) / 4 * 8 + n % 2], sum);
        }
    }
}

// kGroups groups of channels from number `first_group` of a full stage on, in one piece.
template <u32 kGroups, typename At, typename AllSums>
DEVICE void multiply_groups(const Smem& smem, u32 stage, const At& at, PackedRows packed, const Exponents& exponents,
                            u32 first_tokens, u32 first_group, AllSums& sums) {
    constexpr u32 kSums = sizeof(sums.own[0]) / sizeof(float), kBlocks = AllSums::kBlocks;
    using AllSteps = Steps<kSums>;
    constexpr u32 kPieces = AllSteps::kPieces, kPiece = AllSteps::kPiece, kNum = AllSteps::kNum;
    constexpr u32 kSteps = kGroups * kBlocks * kPieces * AllSteps::kOfPiece;
    // Steps in flight while one is promoted, and codes loaded ahead: beside stamps there are registers for less. Two
    // accumulators take turns all the same: where two multiplies of the same weights had one, ptxas dropped the first
    // (NVRTC 12.9 and 13.0).
    constexpr u32 kAhead = kTrace && kSums > 16 ? 0 : 1;
    constexpr bool kLoadsAhead = kSums <= 8 && !kTrace;
    constexpr u32 kHeld = kPieces == 1 ? 2 : AllSteps::kOfPiece;  // steps whose codes are kept
    float partial[2][kNum][kPiece], group[kPiece];
    u32 words[kNum][2], codes[kHeld][kNum][4], of_rows[kGroups][kBlocks];
    packed.swizzle ^= first_group * kGroupChunks * 16;
    const u32 tokens =
        first_tokens + stage * descriptor_step(kTokenTileBytes) + first_group * descriptor_step(kGroupTileBytes);
    const float* token_scales = smem.token_scales[stage] + first_group * kTileTokens + at.first_token;
#pragma unroll
    for (u32 i = 0; i < kSteps + kAhead; ++i) {
        if (i < kSteps) {
            const u32 first = AllSteps::first(i), piece = AllSteps::piece(i);
            u32(&a)[kNum][4] = codes[i % kHeld];
            if (piece == 0) {
                const Multiply next = multiply_number<kBlocks>(first);
                u32& word = of_rows[next.group][next.m];
                if (next.c == 0) word = exponents.load(stage, first_group + next.group, next.m);
                if (!kLoadsAhead || i == 0) load_chunks<kBlocks>(packed, stage, first, words);
                expand_chunks(words, a);
            }
            start_step<kBlocks>(tokens + piece * descriptor_step(2 * kPiece * kBlockKBytes), first, a, partial[i % 2]);
            if (kLoadsAhead && i + 1 < kSteps) load_chunks<kBlocks>(packed, stage, first + kNum, words);
        }
        if (i + 1 <= kAhead) continue;
        if (i < kSteps) {
            wgmma_wait<kAhead>();
        } else {
            wgmma_wait<0>();
        }
        const u32 done = i - kAhead;
        promote_step(AllSteps::first(done), AllSteps::piece(done) * kPiece, exponents, of_rows, token_scales,
                     partial[done % 2], group, sums.own);
    }
}

template <typename At, typename AllSums>
DEVICE void accumulate(const Params& p, Smem& smem, Ring<kNumStages>& ring, const At& at, u32 num, AllSums& sums) {
    // A k-block in one piece, or beside the sums of 64 columns, for want of registers, in one for each group.
    constexpr u32 kSums = sizeof(sums.own[0]) / sizeof(float), kGroups = kSums <= 16 ? kTokenGroups : 1;
    constexpr u32 kRounds = kTokenGroups / kGroups;
    const u32 first_tokens = make_uniform(at.tokens);
    PackedRows packed = find_packed_rows(smem, at.first_row);
    Exponents exponents = find_exponents<kSums>(p, smem, at.first_row);
#pragma unroll 1
    for (u32 i = 0; i < num * kRounds; ++i) {
        const u32 round = i % kRounds;
        if (round == 0) {
            wait_in_flight(p, &smem.full[ring.stage], ring.stage, ring.parity());
            fence_async_shared();  // cp.async wrote the token rows in the generic proxy
        }
        if constexpr (kRounds > 1) {  // there are none to keep these
            packed = find_packed_rows(smem, at.first_row);
            exponents = find_exponents<kSums>(p, smem, at.first_row);
        }
        multiply_groups<kGroups>(smem, ring.stage, at, packed, exponents, first_tokens, round * kGroups, sums);
        if (round + 1 < kRounds) continue;
        sync_warp();
        if (lane_idx() == 0) arrive(&smem.empty[ring.stage]);  // pairs with role_load and role_gather
        ring.advance();
    }
#pragma unroll
    for (u32 m = 0; m < AllSums::kBlocks; ++m) {
#pragma unroll
        for (float& sum : sums.own[m]) sum *= kWeightUnit;
    }
}
