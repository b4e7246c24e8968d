// The emulated machine: its threads, its scheduler, and what the files of this folder share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator.h"

namespace emu {

constexpr u32 kWarpLanes = 32;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr u32 kSharedBase = 1024;  // the system keeps the first KiB of a block's shared memory
constexpr u32 kRegisterFile = 65536;

struct Random {
    u64 state;
    u64 next() {  // splitmix64
        u64 z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    u32 below(u32 n) { return u32((next() >> 32) * n >> 32); }
    bool one_in(u32 n) { return below(n) == 0; }
};

// What a blocked thread waits for: enough for a line of the stall report.
struct Waiting {
    enum Kind { kNothing, kMbarrier, kFlag, kWarp, kNamed, kRegisters } kind = kNothing;
    const void* object = nullptr;
    u32 a = 0, b = 0;  // mbarrier: parity. flag: value seen. named: id, threads. registers: wanted
    const char* what = "";
};

struct AsyncCopy {
    void* shared;
    const void* global;
    u32 num_bytes;
    bool landed;
};

struct Fiber {
    void* stack_pointer = nullptr;
    u32 thread = 0, block = 0;
    enum State { kReady, kBlocked, kExited } state = kReady;
    Waiting waiting;
    u32 result = 0;  // of a warp collective

    const u32* polled = nullptr;  // the flag that its last operation loaded, and what it saw
    u32 polled_value = 0;

    std::deque<AsyncCopy> copies;  // cp.async under way, oldest first
    u64 first_copy = 0;            // number of copies.front()

    u32 wgmma_position = 0;  // in its warp's stream
    bool wgmma_fenced = false;

    u32 warp() const { return thread / kWarpLanes; }
    u32 lane() const { return thread % kWarpLanes; }
};

// One phase-counting barrier in shared memory.
struct Mbarrier {
    u32 expected, pending;
    i64 tx_bytes = 0;
    u32 phase = 0;
    std::vector<Fiber*> waiters;
};

struct Block;
struct Warp;
struct WgmmaStream;

// A warp-wide operation that some lanes have reached.
struct Collective {
    const char* name = nullptr;
    u32 mask = 0, argument = 0, line = 0, arrived = 0;
    u32 values[kWarpLanes], sources[kWarpLanes];
    void* addresses[kWarpLanes];
    const u32* data[kWarpLanes];
};
using Finish = void (*)(Block&, Warp&, Fiber* lanes);

struct Warp {
    Collective collective;
    Finish finish = nullptr;
    u32 exited = 0;
    u32 regs = 0, wanted_regs = 0;  // of a thread
    std::shared_ptr<WgmmaStream> wgmma;
};

struct NamedBarrier {
    u32 num_threads = 0;
    std::vector<u32> arrived;  // lanes, by warp
    std::vector<Fiber*> waiters;
};

// Matrix multiplies of a warpgroup must be the same in its four warps: the calls that some warp has yet to make.
struct WarpgroupLog {
    struct Call {
        u32 n;
        bool accumulate;
        u64 a, b;
    };
    std::deque<Call> calls;
    u32 first = 0;  // number of calls.front()
    u32 made[4] = {};
};

struct Block {
    u8* shared = nullptr;
    std::vector<Warp> warps;
    std::unordered_map<u32, Mbarrier> mbarriers;  // by shared address
    NamedBarrier named[16];
    u32 free_regs = 0;
    u32 num_live = 0;  // threads
    std::vector<WarpgroupLog> warpgroups;
};

struct Region {
    std::string name;
    u8* begin;
    u64 num_bytes;
    bool writable;
};

struct SharedRegion {
    std::string name;
    u32 offset, num_bytes, count;
};

struct RoleRange {
    std::string name;
    u32 begin, end;
};

struct Counters {
    u64 switches = 0, wgmmas = 0, tile_bytes = 0, spurious = 0;
};

struct Machine {
    u32 num_blocks = 0, num_threads = 0, shared_bytes = 0;
    u64 seed = 0;
    bool expire = false;   // on a stall let the clock run out, so that waits with a budget give up
    bool expired = false;
    u64 stalled_at = 0;
    std::vector<Region> regions;
    std::vector<SharedRegion> shared_regions;
    std::vector<RoleRange> roles;

    Random random{0};
    std::vector<Block> blocks;
    std::vector<Fiber> fibers;
    Fiber* current = nullptr;
    u64 step = 0;      // the clock
    u64 progress = 0;  // changes of anything that can be awaited
    u32 num_exited = 0;
    Counters counters;

    // How this seed plays: chosen in start().
    u32 switch_one_in = 8;    // switch threads at one operation in so many
    u32 locality_percent = 0;  // continue the thread made ready last, instead of any
    u32 max_delay = 64;       // of asynchronous work, in steps
    u32 late_percent = 50;    // cp.async that land at their wait only

    Block& block() { return blocks[current->block]; }
    Warp& warp() { return block().warps[current->warp()]; }
};
extern Machine machine;

// scheduler.cpp
void start(void (*kernel)(const void*), const void* params);  // runs the grid to its end
void maybe_switch();                                          // any operation may let others run
void block_on(const Waiting& waiting);                        // until wake()
void wake(Fiber* fiber);
void later(u32 max_delay, std::function<void()> work);        // asynchronous work, in any order
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));  // the kernel broke a rule
std::string place_name(const Fiber& fiber);

// memory.cpp
void* shared_pointer(u32 address, u32 num_bytes, const char* what);
std::string shared_name(u32 address);
std::string address_name(const void* pointer);
void check_shared(const void* pointer, u32 num_bytes, u32 alignment, const char* what);
void check_global(const void* pointer, u32 num_bytes, u32 alignment, bool write, const char* what);
void land_copies(Fiber& fiber, u64 end);
void wake_pollers(bool all, const void* address);
bool any_pollers();

// mbarrier.cpp
void complete_bytes(u32 block, u32 barrier_address, u32 num_bytes);
std::string describe_mbarrier(u32 block, const void* barrier, u32 parity);

// warp.cpp
struct Lane {  // what a lane brings
    u32 value = 0, source = 0;
    void* address = nullptr;
    const u32* data = nullptr;
};
void lane_exited(Fiber& fiber);
void meet(const char* name, u32 mask, u32 argument, u32 line, const Lane& lane, Finish finish);
void check_registers();

// wgmma.cpp
bool wgmma_in_flight(const Warp& warp);

}  // namespace emu
