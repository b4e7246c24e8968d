// Where the math warps read in a stage, and what they multiply the tensor cores' partial sums by.

// Where the warpgroup reads in a stage: all that the main loop needs.
struct Operands {
    u32 weights, tokens;  // low descriptor words in stage 0
    u32 first_token;      // of this lane, among the tile's
    u32 first_row;        // of the warpgroup, among the tile's
    bool gemm_2;          // or rows 0..127 and 128..255 have a scale each all the same
};

template <bool kTokenRows>
DEVICE Operands find_operands(const Smem& smem, const Task& task, const Share& share) {
    const u32 lane = lane_idx();
    return {descriptor_low(smem.weight_tiles[0] + share.first_row * kBlockKBytes),
            descriptor_low(smem.token_tiles[0] + share.first_token * kBlockKBytes),
            kTokenRows ? share.first_token + share.warp * 16 + lane / 4 : lane % 4 * 2, share.first_row,
            task.phase == kGemm2 || kInterleaved || !kGated};
}

// Of the extra tokens: worked out where needed, for registers are scarce.
DEVICE Operands find_extra_operands(const Operands& at) {
    const u32 group = (warp_idx() - kMathWarpBegin) / 4;
    return {at.weights + group * descriptor_step(kBlockRows / 2 * kBlockKBytes),
            at.tokens + (kBlockTokens - group * kWarpgroupTokens) * descriptor_step(kBlockKBytes),
            kBlockTokens + lane_idx() % 4 * 2, group * (kBlockRows / 2), at.gemm_2};
}

// A tile's weight rows have up to three scales in a k-block (schedule: weight_scale). GEMM 1: gate, and up before and
// from where its rows enter the next block of w13_scale. GEMM 2, and GEMM 1 where gate and up are interleaved or
// there is no gate: rows 0..127 and 128..255.
DEVICE bool takes_second_scale(bool gemm_2, u32 weight_row) {
    return gemm_2 ? weight_row >= 128 : kUpBlockRest != 0 && weight_row / 2 >= 128 - kUpBlockRest;
}

// The scales of one k-block, and partial sums times them added to the sums of a 64-row weight block.
template <u32 N, bool kTokenRows>
struct Promotion {
    // Tokens as rows: the products for this thread's two tokens, {gate, gate, up, up}, of weight rows that take the
    // first and the second scale. Where no tile of GEMM 1 has a second, rows from 128 on take `second` in both phases.
    float4 first, second;
    // Tokens as columns: scales of the weights, and of pairs of tokens, in registers unless they are many.
    static constexpr bool kHolds = kTokenRows || N <= 32;
    static constexpr u32 kNumHeld = kTokenRows || !kHolds ? 1 : N / 8;
    float4 weights;
    float2 held[kNumHeld];
    const float* tokens;
    // What begin_k_block will turn to.
    float4 next_weights;
    float2 next_held[kNumHeld];
    const float* next_tokens;

    // Scales of a full stage, before they are needed: beside the reads of the tensor cores shared memory answers late.
    // S1 and S4, 2048 and 8192 tokens: -2.8 to -3.6 % (H200, 2026-12-01).
    DEVICE void load(const Smem& smem, u32 stage, const Operands& at) {
        next_weights = kChannelScales ? make_float4(1.0f, 1.0f, 1.0f, 1.0f)
                                      : *reinterpret_cast<const float4*>(smem.weight_scales[stage]);
        next_tokens = smem.token_scales[stage] + at.first_token;
        if constexpr (kTokenRows) {
            next_held[0] = make_float2(next_tokens[0], next_tokens[8]);
        } else if constexpr (kHolds) {
#pragma unroll
            for (u32 j = 0; j < kNumHeld; ++j) next_held[j] = *reinterpret_cast<const float2*>(next_tokens + j * 8);
        }
    }

    DEVICE void begin_k_block(const Operands& at) {
        const float4 w = next_weights;
        if constexpr (kTokenRows) {
            const float x0 = next_held[0].x, x1 = next_held[0].y;
            const float up = at.gemm_2 ? w.x : w.y, gate_2 = at.gemm_2 ? w.y : w.x;
            const float up_2 = kUpBlockRest == 0 || at.gemm_2 ? w.y : w.z;
            first = make_float4(x0 * w.x, x1 * w.x, x0 * up, x1 * up);
            second = make_float4(x0 * gate_2, x1 * gate_2, x0 * up_2, x1 * up_2);
        } else {
            weights = w;
            tokens = next_tokens;
#pragma unroll
            for (u32 j = 0; j < kNumHeld; ++j) held[j] = next_held[j];
        }
    }

    DEVICE void add(float (&sums)[N / 2], const float (&partial)[N / 2], u32 m, const Operands& at) const {
        const u32 warp = warp_idx() - kMathWarpBegin;
        const bool second_scale = takes_second_scale(at.gemm_2, at.first_row + m * 64 + warp % 4 * 16);
        const float4& w = weights;
        const float low = at.gemm_2 && second_scale ? w.y : w.x;
        const float high = at.gemm_2 ? low : (second_scale ? w.z : w.y);
#pragma unroll
        for (u32 j = 0; j < N / 8; ++j) {
            if constexpr (kTokenRows) {
                // Columns: groups of 8 that alternate between gate and up. Rows: the two tokens.
                const u32 row = m * 64 + j / 2 * 16;
                const bool takes_second = kUpBlockRest == 0 ? row >= 128 : takes_second_scale(at.gemm_2, row);
                const float s0 = takes_second ? (j % 2 ? second.z : second.x) : (j % 2 ? first.z : first.x);
                const float s1 = takes_second ? (j % 2 ? second.w : second.y) : (j % 2 ? first.w : first.y);
                add_four(sums + 4 * j, partial + 4 * j, s0, s0, s1, s1);
            } else {
                // Columns: the two tokens. Rows: gate and up.
                const float2 x = kHolds ? held[kHolds ? j : 0] : *reinterpret_cast<const float2*>(tokens + j * 8);
                add_four(sums + 4 * j, partial + 4 * j, x.x * low, x.y * low, x.x * high, x.y * high);
            }
        }
    }

    DEVICE static void add_four(float* sums, const float* partial, float s0, float s1, float s2, float s3) {
        sums[0] = fmaf(partial[0], s0, sums[0]);
        sums[1] = fmaf(partial[1], s1, sums[1]);
        sums[2] = fmaf(partial[2], s2, sums[2]);
        sums[3] = fmaf(partial[3], s3, sums[3]);
    }
};
