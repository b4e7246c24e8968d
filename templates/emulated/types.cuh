// What CUDA C++ knows by itself and a host compiler does not; integer names, the tensor map, and where a thread is.
// Relies on jitmoe/emulate/runtime/emulator.h, which the compiler puts before the text.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct alignas(64) TensorMap {
    u8 opaque[128];
};

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(max_threads, min_blocks)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float erff(float x) { return __builtin_erff(x); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs(int(x)); }

template <typename To, typename From>
inline To emulated_bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From) && sizeof(To) == 4, "registers have 32 bits");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(u32 x) { return emulated_bit_cast<float>(x); }
inline u32 __float_as_uint(float x) { return emulated_bit_cast<u32>(x); }

// Warp-wide operations: the lanes of the mask meet at the same line.
template <typename T>
inline T __shfl_sync(u32 mask, T value, u32 lane, u32 line = __builtin_LINE()) {
    return emulated_bit_cast<T>(emu::shuffle(emu::kIndex, mask, emulated_bit_cast<u32>(value), lane, line));
}
template <typename T>
inline T __shfl_up_sync(u32 mask, T value, u32 distance, u32 line = __builtin_LINE()) {
    return emulated_bit_cast<T>(emu::shuffle(emu::kUp, mask, emulated_bit_cast<u32>(value), distance, line));
}
template <typename T>
inline T __shfl_xor_sync(u32 mask, T value, u32 lanes, u32 line = __builtin_LINE()) {
    return emulated_bit_cast<T>(emu::shuffle(emu::kXor, mask, emulated_bit_cast<u32>(value), lanes, line));
}
inline u32 __ballot_sync(u32 mask, bool predicate, u32 line = __builtin_LINE()) {
    return emu::ballot(mask, predicate, line);
}
// All lanes take part: the device's needs no more of it here.
inline u32 __match_any_sync(u32 mask, u32 value, u32 line = __builtin_LINE()) {
    u32 same = 0;
    for (u32 lane = 0; lane < 32; ++lane) same |= u32(__shfl_sync(mask, value, lane, line) == value) << lane;
    return same;
}

constexpr u32 kWarpThreads = 32;
constexpr u32 kFullMask = 0xffffffffu;

DEVICE u32 thread_idx() { return emu::here.thread; }
DEVICE u32 lane_idx() { return emu::here.thread % kWarpThreads; }
#ifndef LOCAL_RANKS
#define LOCAL_RANKS 1
#endif

DEVICE u32 num_blocks() { return emu::here.num_blocks / LOCAL_RANKS; }
DEVICE u32 local_rank() { return emu::here.block / num_blocks(); }
DEVICE u32 block_idx() { return emu::here.block % num_blocks(); }

// On the device a shuffle: all lanes meet.
DEVICE u32 warp_idx() { return __shfl_sync(kFullMask, emu::here.thread / kWarpThreads, 0); }

// On the device a reduction: all lanes meet, with one value.
DEVICE u32 make_uniform(u32 value) { return emu::make_uniform(value); }

template <typename T>
DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

DEVICE constexpr u32 ceil_div(u32 x, u32 y) { return (x + y - 1) / y; }

DEVICE void forget_value(u32&) {}

// The CTA's dynamic shared memory, laid out as T.
template <typename T>
DEVICE T& shared_memory() {
    return *static_cast<T*>(emu::dynamic_shared_memory());
}
