// The rail by NCCL's GIN: the network card is told from here, and no host takes part (NCCL User Guide, "Device API -
// GIN"). Functions are of libnccl_device.ltoir of NCCL 2.32 and later, which the linker adds; names, types and order
// are theirs (nccl_device/gin.h, coop.h, core.h), for it is by them that symbols are found. Relies on types.cuh,
// memory.cuh, check.cuh, barriers.cuh.
//
// They are called, not inlined, which has a price: ptxas ignores setmaxnreg then (C7506, an error to jit/), so roles of
// such a kernel have equal registers. Where the card's queue is full, put and signal_add wait inside NCCL without a
// budget.

struct ncclDevComm;
struct ncclWindow_vidmem;
struct ncclGinDescriptorSmem;
struct ncclTeam {
    int nRanks, rank, stride;
};
struct ncclCoopAny {
    u64 storage[2];
    const void* vtable;
};
struct ncclGin_C {
    u64 opaque[8];  // 48 bytes are used, by ncclGin_C_init
};
enum ncclGinSignalType { kSignalNone, kSignalAtAddress };
enum ncclGinSignalOp_t { kSignalInc, kSignalAdd };
enum ncclResult_t { kNcclSuccess };
namespace cuda::std::inline __4 {
enum thread_scope { kScopeSystem };
enum class memory_order : u32 { kAcquire = 2 };
}  // namespace cuda::std::inline __4
using GinWord = unsigned long;  // size_t and uint64_t as the library was compiled

__device__ void ncclCoopAnyInitThread(ncclCoopAny* coop);
__device__ void ncclGin_C_init(ncclGin_C* gin, u32 backends, const ncclDevComm& comm, int context);
__device__ void ncclGinPut(ncclGin_C* gin, ncclTeam team, int peer, ncclWindow_vidmem* to_window, GinWord to,
                           ncclWindow_vidmem* from_window, GinWord from, GinWord bytes, bool has_signal, u32 signal,
                           ncclGinSignalOp_t op, GinWord operand, bool has_counter, u32 counter, ncclCoopAny coop,
                           bool has_descriptor, ncclGinDescriptorSmem* descriptor, cuda::std::thread_scope given,
                           cuda::std::thread_scope required);
__device__ void ncclGinSignal_v3(ncclGin_C* gin, ncclTeam team, int peer, ncclGinSignalType type,
                                 ncclWindow_vidmem* window, GinWord at, u32 signal, bool is_strong,
                                 ncclGinSignalOp_t op, GinWord operand, ncclCoopAny coop, bool has_descriptor,
                                 ncclGinDescriptorSmem* descriptor, cuda::std::thread_scope given,
                                 cuda::std::thread_scope required, u32 flags);
__device__ ncclResult_t ncclGinFlushTimeout(ncclGin_C* gin, ncclCoopAny coop, cuda::std::memory_order order,
                                            bool has_descriptor, ncclGinDescriptorSmem* descriptor, GinWord cycles);

constexpr u32 kGinBackends = 0x3c;  // all that the library knows: proxy, GDAKI, GPI, EFA
// What Params::rail_comm points at: jitmoe/run/nccl_rail.py writes it.
constexpr u32 kGinCommAt = 64;  // of NCCL's ncclDevComm, behind the number of its contexts

// What one thread needs for a call, and what all do before it. A warp always takes the same context, whose puts and
// signals to a rank are in order; neighbours take others.
struct Gin {
    ncclGin_C net;
    ncclCoopAny coop;

    DEVICE explicit Gin(const Params& p) {
        const u32 num_contexts = *reinterpret_cast<const u32*>(p.rail_comm);
        const auto& comm = *reinterpret_cast<const ncclDevComm*>(p.rail_comm + kGinCommAt);
        ncclGin_C_init(&net, kGinBackends, comm, int((block_idx() + thread_idx() / kWarpThreads) % num_contexts));
        ncclCoopAnyInitThread(&coop);
    }

    static DEVICE ncclTeam team(const Params& p) { return {int(kNumNodes), int(p.rank / kNodeRanks), int(kNodeRanks)}; }
    static DEVICE ncclWindow_vidmem* window(const Params& p) {
        return reinterpret_cast<ncclWindow_vidmem*>(p.rail_window);
    }

    // What sync_warp and then one lane's fence of system scope show to the card: all that the warp's lanes wrote, read
    // or saw acquired, and bulk stores that they waited for. NCCL need not fence again.
    static DEVICE void fence() {
        sync_warp();
        if (lane_idx() == 0) fence_sys();
    }
};

// Every warp that uses the rail, first of all.
DEVICE void begin_rail() {}

DEVICE void put(const Params& p, u32 node, i64 to, i64 from, u32 bytes) {
    using namespace cuda::std;
    Gin::fence();
    if (lane_idx() == 0) {
        Gin gin(p);
        const GinWord start = p.rail_offset;
        ncclGinPut(&gin.net, Gin::team(p), int(node), Gin::window(p), start + to, Gin::window(p), start + from, bytes,
                   false, 0, kSignalInc, 0, false, 0, gin.coop, false, nullptr, kScopeSystem, kScopeSystem);
    }
    sync_warp();
}

// A strong signal: it shows once all that its context put to the rank before has landed.
DEVICE void signal_add(const Params& p, u32 node, i64 at, u64 value) {
    using namespace cuda::std;
    Gin::fence();
    if (lane_idx() == 0) {
        Gin gin(p);
        ncclGinSignal_v3(&gin.net, Gin::team(p), int(node), kSignalAtAddress, Gin::window(p), p.rail_offset + at, 0,
                         true, kSignalAdd, value, gin.coop, false, nullptr, kScopeSystem, kScopeSystem, 0);
    }
    sync_warp();
}

// Of all that its context put, other warps' too. NCCL counts cycles of the SM's clock, of which there are 2,000 in a
// microsecond at most: the budget may be longer than asked for.
constexpr u32 kMaxCyclesPerUs = 2000;
DEVICE void flush(const Params& p) {
    sync_warp();
    u32 result = kNcclSuccess;
    if (lane_idx() == 0) {
        Gin gin(p);
        result = ncclGinFlushTimeout(&gin.net, gin.coop, cuda::std::memory_order::kAcquire, false, nullptr,
                                     GinWord(p.timeout_us) * kMaxCyclesPerUs);
        if (result != kNcclSuccess) report_timeout(p, kWaitFlush, p.rank, result);
    }
    if (__shfl_sync(kFullMask, result, 0) != kNcclSuccess) exit_thread();
}
