// Number formats and the approximate functions of the special-function unit, here exact. Relies on types.cuh.

// One e4m3 value, round to nearest even, saturating at 448 (PTX ISA, cvt.rn.satfinite): NaN becomes 0x7f.
DEVICE u32 emulated_e4m3(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    const float magnitude = fabsf(x);
    if (magnitude != magnitude) return 0x7f;
    if (magnitude >= 448.0f) return sign | 0x7e;
    const i32 exponent = i32(bits >> 23 & 0xff) - 127;
    // In units of the last place: 2^-9 for subnormals, else 2^(exponent - 3). Adding 1.5 * 2^23 rounds to even.
    const i32 unit = exponent < -6 ? -9 : exponent - 3;
    const float scaled = magnitude * __uint_as_float(u32(127 - unit) << 23);
    const u32 units = __float_as_uint(scaled + 12582912.0f) & 0x3fffff;
    // 8 to 16 units for a normal number; 16 carries into the exponent by plain addition.
    return sign | (unit == -9 ? units : u32(unit + 9) * 8 + units);
}

// Two e4m3 values: `low` in bits 0..7.
DEVICE u32 pack_e4m3(float low, float high) { return emulated_e4m3(low) | emulated_e4m3(high) << 8; }

// One bf16 value, round to nearest even; NaN becomes 0x7fff.
DEVICE u32 emulated_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Two bf16 values: `low` in bits 0..15.
DEVICE u32 pack_bf16(float low, float high) { return emulated_bf16(low) | emulated_bf16(high) << 16; }

DEVICE float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
DEVICE float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// Two products of two, each rounded to nearest even; subnormals are numbers (PTX ISA, mul.bf16x2).
DEVICE u32 multiply_bf16x2(u32 x, u32 y) { return pack_bf16(bf16_low(x) * bf16_low(y), bf16_high(x) * bf16_high(y)); }

// Subnormals become zero (PTX ISA, .ftz).
DEVICE float emulated_flush(float x) { return fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x; }

DEVICE float exp2_approx(float x) { return emulated_flush(float(__builtin_exp2(double(emulated_flush(x))))); }

DEVICE float reciprocal_approx(float x) { return emulated_flush(1.0f / emulated_flush(x)); }

// x * sigmoid(x); for large negative x the exponential overflows to infinity and the result is -0.
DEVICE float silu(float x) { return x * reciprocal_approx(1.0f + exp2_approx(-1.4426950408889634f * x)); }

// The smaller and the larger, and NaN if either is: fminf and fmaxf would hide it.
DEVICE float min_or_nan(float x, float y) { return x != x || x < y ? x : y; }
DEVICE float max_or_nan(float x, float y) { return x != x || x > y ? x : y; }

// Selects bytes of (high, low) by the nibbles of `selector` (PTX ISA, prmt): bit 3 of a nibble replicates the sign.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
    const u64 bytes = u64(high) << 32 | low;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 nibble = selector >> 4 * i & 15;
        u32 byte = u32(bytes >> 8 * (nibble & 7)) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}
