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
constexpr u32 kMaxCalls = 64;  // that a thread's call stack remembers

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
    enum Kind { kNothing, kMbarrier, kFlag, kWarp, kNamed, kCluster, kRegisters, kStart, kEnd } kind = kNothing;
    const void* object = nullptr;
    u32 a = 0, b = 0;  // mbarrier: parity. flag: its bytes. named: id, threads. registers: wanted
    const char* what = "";
};

// What has happened, for the checked build: by agent the last epoch that is known to be over (races.cpp).
struct Clock {
    std::vector<u32> epochs;
    std::shared_ptr<const Clock> last;  // joined: often the next one too
    bool knows(u32 agent, u32 epoch) const { return agent < epochs.size() && epochs[agent] >= epoch; }
    void know(u32 agent, u32 epoch);
    void join(const Clock& other);
    void join(const std::shared_ptr<const Clock>& other);
};
using SharedClock = std::shared_ptr<const Clock>;  // threads that met know the same

// Known to whom: to this thread's accesses in the generic proxy, or to the async proxy when it works for this thread,
// or, beyond the generic proxy's, to what the network card does for it in a peer's memory.
enum View : u32 { kGenericView, kAsyncSharedView, kAsyncGlobalView, kNetworkView, kNumViews };
struct Clocks {
    Clock views[kNumViews];
};
struct SharedClocks {
    SharedClock views[kNumViews];
};

// What a release takes to other blocks.
struct Message {
    Clock generic, network;
    void join(const Message& other);
};

extern const char kBulkCopy[];  // name of the agents of tensor and bulk copies
extern const char kPut[];       // of the writes of the network card
struct AsyncAgent {
    u32 index = ~0u, epoch = 0;
};

struct AsyncCopy {
    void* shared;
    const void* global;
    u32 num_bytes;
    bool landed;
};

// cp.async of a thread before its commit number so-and-so.
struct CopyGroup {
    u64 end;  // number of the first copy after it
    AsyncAgent agent;
};

// A copy from shared to global memory.
struct BulkStore {
    const u8* shared;
    u8* global;
    u32 num_bytes;
    bool is_read, is_written;
    std::vector<u8> bytes;  // between the two
};

// Bulk stores of a thread between two of its commits.
struct StoreGroup {
    std::vector<std::shared_ptr<BulkStore>> stores;
    AsyncAgent reader, writer;
};

struct Fiber {
    void* stack_pointer = nullptr;
    u32 thread = 0, block = 0;
    enum State { kReady, kBlocked, kExited, kKilled } state = kReady;
    bool is_starved = false;
    Waiting waiting;
    u32 result = 0;  // of a warp collective

    const void* polled = nullptr;  // the flag that its last operation loaded, and what it saw
    u64 polled_value = 0;
    const void* last_loaded = nullptr;
    u32 last_bytes = 0;  // of last_loaded

    std::deque<AsyncCopy> copies;  // cp.async under way, oldest first
    u64 first_copy = 0;            // number of copies.front()
    std::deque<CopyGroup> copy_groups;

    StoreGroup new_stores;                // not committed
    std::deque<StoreGroup> store_groups;  // not waited for, oldest first
    u32 num_read_groups = 0;              // of them: known to have read their shared memory

    u32 wgmma_position = 0;  // in its warp's stream
    bool wgmma_fenced = false;

    AsyncAgent copy_agent;                // of its cp.async
    std::vector<AsyncAgent> bulk_agents;  // of its tensor and bulk copies to shared memory, in turn
    u32 num_bulk_copies = 0;
    u32 calls[kMaxCalls], num_calls = 0;  // in the checked build: where kernel text calls kernel text

    u32 warp() const { return thread / kWarpLanes; }
    u32 lane() const { return thread % kWarpLanes; }
    bool is_over() const { return state == kExited || state == kKilled; }
};

// One phase-counting barrier in shared memory.
struct Mbarrier {
    u32 expected, pending;
    i64 tx_bytes = 0;
    u32 phase = 0;
    std::vector<Fiber*> waiters;
    u32 initialised_by = 0;                      // thread
    bool is_fenced = false;                      // fence.mbarrier_init
    Clocks arrived;                              // in this phase
    SharedClocks completed;                      // the phase before
    Message cluster_arrived, cluster_completed;  // by other blocks
};

struct Block;
struct Warp;
struct WgmmaStream;
struct Puts;

// A warp-wide operation that some lanes have reached.
struct Collective {
    const char* name = nullptr;
    u32 mask = 0, argument = 0, line = 0, arrived = 0;
    u32 values[kWarpLanes], sources[kWarpLanes];
    void* addresses[kWarpLanes];
    const u32* data[kWarpLanes];
    const void* at;  // in the kernel's code
};
using Finish = void (*)(Block&, Warp&, Fiber* lanes);

struct Warp {
    Collective collective;
    Finish finish = nullptr;
    u32 exited = 0;
    u32 regs = 0, wanted_regs = 0;  // of a thread
    std::shared_ptr<WgmmaStream> wgmma;
    std::shared_ptr<Puts> puts;
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
    u32 grid = 0;
    u8* shared = nullptr;
    std::vector<Warp> warps;
    std::unordered_map<u32, Mbarrier> mbarriers;  // by shared address
    NamedBarrier named[16];
    u32 free_regs = 0;
    u32 num_live = 0;              // threads
    bool lets_next_start = false;  // the launch behind its own in the stream
    std::vector<WarpgroupLog> warpgroups;
};

// What an array holds once the launches before are over; until then it holds something else.
struct Late {
    u32 region;
    std::vector<u8> contents;
};

// A launch of the kernel.
struct Grid {
    u32 first_block, num_blocks;
    u32 stream, launch;  // place in machine.streams, and among the launches of that one
    std::shared_ptr<void> params;
    std::vector<Late> late;
    u32 num_live = 0;                // threads
    u32 num_letting_next_start = 0;  // blocks
    bool asked_for_next = false;     // by start_next_launch, not by exits alone
    bool is_free = false;            // all launches before it are over
    SharedClocks before;             // what they did, then
};

// Launches one after another, on a GPU of their own: a rank. Streams run at once.
struct Stream {
    u32 number;
    std::vector<u32> grids;
    bool is_killed = false;
    bool is_held = false;  // its threads do not run (delays.cpp)
    u64 runs_until = 0;    // step; then it is held
    std::vector<Fiber*> held;
};

struct Region {
    std::string name;
    u8* begin;
    u64 num_bytes, lead;  // bytes mapped before it
    bool writable;
    bool is_late = false;  // written between launches
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
    u32 num_blocks = 0, num_threads = 0, shared_bytes = 0, cluster_size = 1;
    std::vector<Grid> grids;
    std::vector<Stream> streams;
    u64 seed = 0;
    bool checked = false;        // kernel text reports its accesses (races.cpp)
    bool hardware_sums = false;  // of wgmma: as an H200 cuts them off, rather than exact (wgmma.cpp)
    bool expire = false;         // on a stall let the clock run out, so that waits with a budget give up
    bool expired = false;        // it runs out now: until the stalled launch is over
    bool has_expired = false;
    u64 stalled_at = 0, flown_ns = 0;
    bool delays = false;    // streams are held back at random
    u32 killed_stream = 0;  // from this step on
    u64 killed_at = ~0ull;
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
    u32 switch_one_in = 8;     // switch threads at one operation in so many
    u32 locality_percent = 0;  // continue the thread made ready last, instead of any
    u32 max_delay = 64;        // of asynchronous work, in steps
    u32 late_percent = 50;     // cp.async that land at their wait only
    u32 starved_one_in = 0;    // of the warps, or of their lanes, run only when hardly any other can
    u32 starved_threads = kWarpLanes;

    Block& block() { return blocks[current->block]; }
    Grid& grid_of(u32 block) { return grids[blocks[block].grid]; }
    Stream& stream_of(const Fiber& fiber) { return streams[grid_of(fiber.block).stream]; }
    u32 cluster_of(u32 block) const { return block / cluster_size; }
    Warp& warp() { return block().warps[current->warp()]; }
};
extern Machine machine;

// scheduler.cpp
void start(void (*kernel)(const void*));  // runs the grids to their end
void maybe_switch();                      // any operation may let others run
void block_on(const Waiting& waiting);    // until wake()
void wake(Fiber* fiber);
void make_ready(Fiber* fiber);
void later(u32 max_delay, std::function<void()> work);  // asynchronous work, in any order
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));  // the kernel broke a rule
void end_expiry();
std::string place_name(const Fiber& fiber);
std::string block_name(u32 block);

// memory.cpp
void* shared_pointer(u32 address, u32 num_bytes, const char* what);
std::string shared_name(u32 address);
std::string address_name(const void* pointer);
void check_shared(const void* pointer, u32 num_bytes, u32 alignment, const char* what);
void check_global(const void* pointer, u32 num_bytes, u32 alignment, bool write, const char* what);
void land_copies(Fiber& fiber, u64 end);
void wake_pollers(bool all, const void* address);
bool any_pollers();

// races.cpp; all but new_agent do nothing unless the build is checked
enum class Access : u8 { kRead, kWrite, kAtomicLoad, kAtomicStore };
void start_checking();
void release(const Fiber& fiber, Clocks& to);
void acquire(const Fiber& fiber, const SharedClocks& from);
SharedClocks share(Clocks&& clocks);
void meet_clocks(const std::vector<Fiber*>& fibers);    // a barrier: each knows what all know
void release_message(const Fiber& fiber, Message& to);  // to other blocks
void acquire_message(const Fiber& fiber, const Message& from);
void fence_proxy(View view);
AsyncAgent new_agent(const char* kind);  // that works for the running thread
void release_async(const AsyncAgent& agent, bool is_generic, Clocks& to);
void check_access(const void* pointer, u32 num_bytes, Access access, const void* at);
void check_access(const void* pointer, u32 num_bytes, Access access, const void* at, const Fiber& fiber,
                  Scope scope = kSys);
bool check_async_access(const AsyncAgent& agent, const void* pointer, u32 num_bytes, Access access, View view,
                        const void* at);             // false: it reads garbage
SharedClocks end_launches_before(const Grid& grid);  // and its late contents are written
void print_garbage();
void check_word(const void* word, u32 num_bytes, bool loads, bool stores, Order order, Scope scope, const void* at);
void check_put(const AsyncAgent& writer, const void* target, u32 num_bytes, Access access, const void* at);
void release_put(const AsyncAgent& writer, Message& to);
void land_message(const void* word, u32 from_block, const Message& message);
void check_fence(Scope scope);

// launches.cpp
void start_streams();
void thread_exited(const Fiber& fiber);

// delays.cpp
void start_delays();
void hold_at_random(Stream& stream);
bool keeps(Fiber* fiber);  // from running now
void kill_stream();

// cluster.cpp
u32 block_in_cluster(u32 rank);      // of the running thread
bool complete_cluster(u32 cluster);  // if all are at its barrier
u32 num_at_cluster_barrier(u32 cluster);

// mbarrier.cpp
std::string describe_mbarrier(u32 block, const void* barrier, u32 parity);

// warp.cpp
struct Lane {  // what a lane brings
    u32 value = 0, source = 0;
    void* address = nullptr;
    const u32* data = nullptr;
    const void* at = nullptr;
};
void lane_exited(Fiber& fiber);
void meet(const char* name, u32 mask, u32 argument, u32 line, const Lane& lane, Finish finish);
void check_registers();

// stores.cpp
bool may_read_shared(const Fiber& fiber);  // its bulk stores, for all that it knows
void land_stores(const Grid& grid);

// rail.cpp
bool may_read_source(const Warp& warp);  // its puts, for all that it knows

// wgmma.cpp
bool wgmma_in_flight(const Warp& warp);

}  // namespace emu
