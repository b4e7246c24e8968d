// Integer names, the opaque tensor map, and where a thread is. Relies on nothing.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct alignas(64) TensorMap {
    u8 opaque[128];
};

#define DEVICE __device__ __forceinline__

constexpr u32 kWarpThreads = 32;
constexpr u32 kFullMask = 0xffffffffu;

// The compiler forgets what it knows of `value`: nothing derived from it is computed ahead and kept in registers.
DEVICE void forget_value(u32& value) { asm volatile("" : "+r"(value)); }

DEVICE u32 thread_idx() { return threadIdx.x; }
DEVICE u32 lane_idx() {
    u32 thread = threadIdx.x;
#ifdef REGISTERS_ARE_SCARCE
    forget_value(thread);  // else one register holds the lane for all roles
#endif
    return thread % kWarpThreads;
}
#ifndef LOCAL_RANKS
#define LOCAL_RANKS 1
#endif

// CTAs of a rank. Ranks of one launch have as many each.
DEVICE u32 num_blocks() { return gridDim.x / LOCAL_RANKS; }
DEVICE u32 local_rank() { return LOCAL_RANKS > 1 ? blockIdx.x / num_blocks() : 0; }

// Volatile, so that it is read again where needed and not kept in a register from the start of the kernel.
DEVICE u32 block_idx() {
    u32 index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return LOCAL_RANKS > 1 ? index % num_blocks() : index;
}

// The shuffle tells the compiler that the index is the same in the whole warp.
DEVICE u32 warp_idx() { return __shfl_sync(kFullMask, threadIdx.x / kWarpThreads, 0); }

template <typename T>
DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

DEVICE constexpr u32 ceil_div(u32 x, u32 y) { return (x + y - 1) / y; }

// `value`, equal in all lanes, for the uniform datapath: what follows from it takes no vector registers.
DEVICE u32 make_uniform(u32 value) {
    u32 uniform;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(uniform) : "r"(value));
    return uniform;
}

// The CTA's dynamic shared memory, laid out as T.
template <typename T>
DEVICE T& shared_memory() {
    extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
    return *reinterpret_cast<T*>(dynamic_shared_memory);
}
