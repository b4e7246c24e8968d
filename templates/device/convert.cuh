// Number formats and the approximate functions of the special-function unit. Relies on types.cuh.

// Two e4m3 values, round to nearest even, saturating at 448: `low` in bits 0..7.
DEVICE u32 pack_e4m3(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two bf16 values, round to nearest even: `low` in bits 0..15.
DEVICE u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

DEVICE float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
DEVICE float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// Two products of two, each rounded to nearest even; subnormals are numbers (PTX ISA, mul.bf16x2).
DEVICE u32 multiply_bf16x2(u32 x, u32 y) {
    u32 z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x * sigmoid(x); for large negative x the exponential overflows to infinity and the result is -0.
DEVICE float silu(float x) { return x * reciprocal_approx(1.0f + exp2_approx(-1.4426950408889634f * x)); }

// The smaller and the larger, and NaN if either is: fminf and fmaxf would hide it.
DEVICE float min_or_nan(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

DEVICE float max_or_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Selects bytes of (high, low) by the nibbles of `selector` (PTX ISA, prmt): bit 3 of a nibble replicates the sign.
// __byte_perm would mask these bits first.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}
