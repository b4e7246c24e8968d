// Tokens of bf16 to e4m3, a scale for 128 channels.

// FP8 weights take tokens in FP8.
DEVICE bool quantizes_x(const Params& p) { return kQuantizes && p.x_is_bf16; }

// Scale of a quantisation group and the factor that takes its values to e4m3 (reference.quantize_tokens).
DEVICE float quant_scale(float amax) { return fmaxf(amax, 1e-10f) * (1.0f / 448.0f); }
DEVICE float quant_factor(float amax) { return __fdiv_rn(448.0f, fmaxf(amax, 1e-10f)); }

// 16 channels of a token as e4m3, and the scale of their group.
struct Quantized {
    uint4 codes;
    float scale;
};

// Every lane has 16 bf16 channels, 8 neighbouring lanes a group of 128.
DEVICE Quantized quantize_16(const uint4 (&raw)[2]) {
    const u32 words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
    float amax = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) amax = fmaxf(amax, fmaxf(fabsf(bf16_low(words[i])), fabsf(bf16_high(words[i]))));
#pragma unroll
    for (u32 mask = 1; mask < 8; mask *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, mask));
    const float factor = quant_factor(amax);
    u32 codes[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        codes[i] = pack_e4m3(bf16_low(words[2 * i]) * factor, bf16_high(words[2 * i]) * factor) |
                   pack_e4m3(bf16_low(words[2 * i + 1]) * factor, bf16_high(words[2 * i + 1]) * factor) << 16;
    }
    return {make_uint4(codes[0], codes[1], codes[2], codes[3]), quant_scale(amax)};
}
