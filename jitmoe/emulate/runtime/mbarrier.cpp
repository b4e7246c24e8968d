// mbarriers, and the tensor copies that complete on them.
#include "machine.h"

namespace emu {

constexpr u32 kMaxArrivals = (1 << 20) - 1;
constexpr i64 kMaxTxBytes = (1 << 20) - 1;
constexpr u64 kMark = 0x6d62617272696572ull;  // what the 8 bytes in shared memory hold: other writes show

#define HERE __builtin_return_address(0)

static Mbarrier& find(u32 block, u32 address, const char* what) {
    auto& barriers = machine.blocks[block].mbarriers;
    const auto found = barriers.find(address);
    if (found == barriers.end()) fail("%s on %s: not an initialised mbarrier", what, shared_name(address).c_str());
    const u8* bytes = machine.blocks[block].shared + (address - kSharedBase);
    if (*reinterpret_cast<const u64*>(bytes) != kMark) {
        fail("%s on %s: something wrote over the mbarrier", what, shared_name(address).c_str());
    }
    return found->second;
}

void init_barrier(u64* barrier, u32 arrivals) {
    maybe_switch();
    check_shared(barrier, 8, 8, "mbarrier.init");
    if (arrivals < 1 || arrivals > kMaxArrivals) fail("mbarrier.init with %u arrivals", arrivals);
    const u32 address = shared_address(barrier);
    machine.block().mbarriers.erase(address);
    Mbarrier& b = machine.block().mbarriers[address];
    b.expected = b.pending = arrivals;
    b.initialised_by = machine.current->thread;
    check_access(barrier, 8, Access::kWrite, HERE);
    *barrier = kMark;
}

// "fence.mbarrier_init orders the prior mbarrier.init operations of the executing thread": before it the async proxy
// does not know them.
void fence_barrier_init() {
    maybe_switch();
    for (auto& entry : machine.block().mbarriers) {
        if (entry.second.initialised_by == machine.current->thread) entry.second.is_fenced = true;
    }
}

// "The current phase completes when pending arrivals and tx-count are both zero; the barrier then enters the next phase
// with the expected arrivals pending."
static void complete_if_due(Mbarrier& barrier) {
    if (barrier.pending != 0 || barrier.tx_bytes != 0) return;
    barrier.phase += 1;
    barrier.pending = barrier.expected;
    barrier.completed = share(std::move(barrier.arrived));
    barrier.arrived = Clocks{};
    barrier.cluster_completed = std::move(barrier.cluster_arrived);
    barrier.cluster_arrived = Message{};
    machine.progress += 1;
    const std::vector<Fiber*> waiters = std::move(barrier.waiters);
    barrier.waiters.clear();
    for (Fiber* fiber : waiters) wake(fiber);
}

// "expect_tx increases the tx-count by its operand, before the arrive."
static void arrive_at(Mbarrier& b, u32 address, u32 expect_bytes) {
    b.tx_bytes += expect_bytes;
    if (b.tx_bytes > kMaxTxBytes) fail("%s expects more than %lld bytes", shared_name(address).c_str(), kMaxTxBytes);
    if (b.pending == 0) fail("more than %u arrivals in a phase of %s", b.expected, shared_name(address).c_str());
    b.pending -= 1;
    machine.progress += 1;
    complete_if_due(b);
}

// "mbarrier.arrive has release semantics, and a try_wait that returns true has acquire semantics", at cta scope.
void arrive(u64* barrier, u32 expect_bytes) {
    maybe_switch();
    const u32 address = shared_address(barrier);
    Mbarrier& b = find(machine.current->block, address, "mbarrier.arrive");
    check_access(barrier, 8, Access::kAtomicStore, HERE);
    release(*machine.current, b.arrived);
    arrive_at(b, address, expect_bytes);
}

// "mbarrier.arrive on .shared::cluster may signal an mbarrier of another CTA"; with .release.cluster.
void arrive_cluster(u64* barrier, u32 rank) {
    maybe_switch();
    const u32 address = shared_address(barrier), block = block_in_cluster(rank);
    Mbarrier& b = find(block, address, "mbarrier.arrive");
    check_access(map_shared(barrier, rank), 8, Access::kAtomicStore, HERE);
    if (block == machine.current->block) {
        release(*machine.current, b.arrived);
    } else {
        release_message(*machine.current, b.cluster_arrived);
    }
    arrive_at(b, address, 0);
}

static void check_alive(u32 block, const char* what) {
    if (machine.blocks[block].num_live == 0 && !machine.has_expired)
        fail("%s lands in block %u, which is over", what, block);
}

// cp.async.mbarrier.arrive: "an arrive-on operation is triggered when all prior cp.async operations of the executing
// thread complete"; with .noinc it is one of the expected arrivals.
void arrive_after_copies(u64* barrier) {
    maybe_switch();
    Fiber* self = machine.current;
    const u32 address = shared_address(barrier);
    const u64 end = self->first_copy + self->copies.size();
    find(self->block, address, "cp.async.mbarrier.arrive");
    check_access(barrier, 8, Access::kAtomicStore, HERE);
    const AsyncAgent agent = self->copy_agent;
    if (agent.epoch != 0) self->copy_agent.epoch += 1;
    later(machine.max_delay, [=] {
        check_alive(self->block, "cp.async");
        land_copies(*self, end);
        Mbarrier& b = find(self->block, address, "cp.async.mbarrier.arrive");
        if (agent.epoch != 0) release_async(agent, true, b.arrived);
        arrive_at(b, address, 0);
    });
}

// The agent of a tensor or bulk copy. Copies of one thread complete in any order, so each has an agent of its own; they
// take turns, many more than can be under way.
static AsyncAgent begin_bulk_copy() {
    constexpr u32 kNumAgents = 64;
    Fiber* self = machine.current;
    const u32 turn = self->num_bulk_copies++ % kNumAgents;
    if (turn == self->bulk_agents.size()) self->bulk_agents.push_back(new_agent(kBulkCopy));
    AsyncAgent& agent = self->bulk_agents[turn];
    agent.epoch += 1;
    return agent;
}

static void complete_bytes(u32 block, u32 address, u32 num_bytes, const AsyncAgent& agent, bool is_last) {
    Mbarrier& b = find(block, address, "complete_tx");
    if (is_last) release_async(agent, false, b.arrived);
    b.tx_bytes -= num_bytes;
    if (b.tx_bytes < -kMaxTxBytes) fail("%s was sent bytes that nobody expects", shared_name(address).c_str());
    machine.progress += 1;
    complete_if_due(b);
}

// "try_wait.parity waits for the completion of the phase with that parity: the current phase, or the one immediately
// before it. It may suspend the thread, and may return false after a time." A suspended thread wakes when the phase
// completes; some waits return false for no reason.
static bool wait_for_phase(u64* barrier, u32 parity, bool acquires_cluster, const void* at) {
    maybe_switch();
    Mbarrier& b = find(machine.current->block, shared_address(barrier), "mbarrier.try_wait");
    if (parity > 1) fail("mbarrier.try_wait for parity %u", parity);
    check_access(barrier, 8, Access::kAtomicLoad, at);
    if ((b.phase & 1) == parity) {
        if (machine.expired || machine.random.one_in(8)) return false;
        b.waiters.push_back(machine.current);
        block_on({Waiting::kMbarrier, barrier, parity, 0, ""});
        if ((b.phase & 1) == parity) return false;
    }
    acquire(*machine.current, b.completed);
    if (acquires_cluster) acquire_message(*machine.current, b.cluster_completed);
    return true;
}

bool try_wait(u64* barrier, u32 parity) { return wait_for_phase(barrier, parity, false, HERE); }
bool try_wait_cluster(u64* barrier, u32 parity) { return wait_for_phase(barrier, parity, true, HERE); }

// "test_wait is a non-blocking instruction."
bool test_wait(u64* barrier, u32 parity) {
    maybe_switch();
    Mbarrier& b = find(machine.current->block, shared_address(barrier), "mbarrier.test_wait");
    if (parity > 1) fail("mbarrier.test_wait for parity %u", parity);
    check_access(barrier, 8, Access::kAtomicLoad, HERE);
    if ((b.phase & 1) == parity) return false;
    acquire(*machine.current, b.completed);
    return true;
}

std::string describe_mbarrier(u32 block, const void* barrier, u32 parity) {
    const u8* shared = machine.blocks[block].shared;
    const u32 address = kSharedBase + u32(static_cast<const u8*>(barrier) - shared);
    const Mbarrier& b = machine.blocks[block].mbarriers.at(address);
    char text[200];
    std::snprintf(text, sizeof text, "mbarrier %s, parity %u: phase %u lacks %u of %u arrivals and %lld bytes",
                  shared_name(address).c_str(), parity, b.phase, b.pending, b.expected, b.tx_bytes);
    return text;
}

// The emulator's tensor map (jitmoe/emulate/run.py encodes it): dimensions and box innermost first.
struct EmulatedMap {
    const u8* data;
    u32 magic, rank;
    u64 dims[5];
    u64 strides[4];  // bytes, of all dimensions but the innermost
    u32 box[5];
};
static_assert(sizeof(EmulatedMap) <= 128, "a tensor map has 128 bytes");
constexpr u32 kMapMagic = 0x50414d54;

struct TileCopy {
    EmulatedMap map;
    int coords[5];
    u32 block, tile, barrier;
    AsyncAgent agent;
    std::vector<bool> garbage;   // by chunk of 16 bytes, if any
    std::shared_ptr<u32> parts;  // that have not landed
};

// 16 bytes of a row of the box, of which the first `num` are inside.
static const u8* find_chunk(const TileCopy& copy, u32 row, u32 column, u32& num) {
    const EmulatedMap& map = copy.map;
    const u8* source = map.data;
    bool inside = true;
    for (u32 d = 1, rest = row; d < map.rank; rest /= map.box[d], ++d) {
        const i64 at = i64(copy.coords[d]) + rest % map.box[d];
        inside = inside && at >= 0 && u64(at) < map.dims[d];
        source += at * i64(map.strides[d - 1]);
    }
    const i64 at = i64(copy.coords[0]) + column;
    const i64 left = inside && at >= 0 ? i64(map.dims[0]) - at : 0;
    num = left < 0 ? 0 : left < 16 ? u32(left) : 16;
    return source + at;
}

// Rows `begin` .. `end` of the box. "128-byte swizzle: bits 4..6 of the shared address are XORed with bits 7..9;
// 64-byte swizzle: bits 4..5 with bits 7..8." It is as wide as the box. "Elements out of bounds are zero, and count."
static void copy_rows(const TileCopy& copy, u32 begin, u32 end) {
    const EmulatedMap& map = copy.map;
    u8* shared = machine.blocks[copy.block].shared;
    check_alive(copy.block, "a tensor copy");
    for (u32 row = begin; row < end; ++row) {
        for (u32 column = 0; column < map.box[0]; column += 16) {
            u32 num;
            const u8* source = find_chunk(copy, row, column, num);
            const u32 linear = copy.tile + row * map.box[0] + column;
            u8* chunk = shared + ((linear ^ ((linear >> 7 & (map.box[0] / 16 - 1)) << 4)) - kSharedBase);
            std::memcpy(chunk, source, num);
            std::memset(chunk + num, 0, 16 - num);
            if (copy.garbage[(row * map.box[0] + column) / 16]) std::memset(chunk, 0xff, 16);
        }
    }
    complete_bytes(copy.block, copy.barrier, (end - begin) * map.box[0], copy.agent, --*copy.parts == 0);
}

static void check_fenced(const Mbarrier& barrier, u32 address) {
    if (!barrier.is_fenced)
        fail("a copy completes on %s: no fence.mbarrier_init since its init", shared_name(address).c_str());
}

// cp.async.bulk: "sizes and addresses are multiples of 16".
void load_bulk(void* shared, const void* global, u32 num_bytes, u64* full) {
    maybe_switch();
    if (num_bytes % 16 != 0) fail("a bulk copy of %u bytes: not a multiple of 16", num_bytes);
    check_shared(shared, num_bytes, 16, "bulk copy");
    check_global(global, num_bytes, 16, false, "bulk copy");
    const u32 block = machine.current->block, barrier = shared_address(full);
    check_fenced(find(block, barrier, "bulk copy"), barrier);
    machine.counters.tile_bytes += num_bytes;
    const AsyncAgent agent = begin_bulk_copy();
    check_async_access(agent, shared, num_bytes, Access::kWrite, kAsyncSharedView, HERE);
    std::vector<bool> garbage;
    for (u32 at = 0; at < num_bytes; at += 16) {
        const u8* chunk = static_cast<const u8*>(global) + at;
        garbage.push_back(!check_async_access(agent, chunk, 16, Access::kRead, kAsyncGlobalView, HERE));
    }
    std::memset(shared, 0xff, num_bytes);
    later(machine.max_delay, [=] {
        check_alive(block, "a bulk copy");
        for (u32 at = 0; at < num_bytes; at += 16) {
            if (!garbage[at / 16]) std::memcpy(static_cast<u8*>(shared) + at, static_cast<const u8*>(global) + at, 16);
        }
        complete_bytes(block, barrier, num_bytes, agent, true);
    });
}

// One block's part of a tensor copy. It lands in one or several pieces, in any order.
static void start_copy(TileCopy copy, u32 rows, const void* at) {
    check_fenced(find(copy.block, copy.barrier, "tensor copy"), copy.barrier);
    u8* tile = machine.blocks[copy.block].shared + (copy.tile - kSharedBase);
    machine.counters.tile_bytes += rows * 128;
    copy.agent = begin_bulk_copy();
    const u32 width = copy.map.box[0];
    check_async_access(copy.agent, tile, rows * width, Access::kWrite, kAsyncSharedView, at);
    copy.garbage.resize(rows * width / 16);
    for (u32 chunk = 0; machine.checked && chunk < rows * width / 16; ++chunk) {
        u32 num;
        const u8* source = find_chunk(copy, chunk * 16 / width, chunk * 16 % width, num);
        copy.garbage[chunk] = num && !check_async_access(copy.agent, source, num, Access::kRead, kAsyncGlobalView, at);
    }
    std::memset(tile, 0xff, rows * width);  // poison until the bytes land
    const u32 parts = rows % 4 == 0 ? 1u << machine.random.below(3) : 1;
    copy.parts = std::make_shared<u32>(parts);
    for (u32 part = 0; part < parts; ++part) {
        later(machine.max_delay, [=] { copy_rows(copy, rows / parts * part, rows / parts * (part + 1)); });
    }
}

static void load_tile_to(void* tile, const void* map, u64* full, u32 rank, const int* coords,
                         const std::vector<u32>& blocks, const void* at) {
    maybe_switch();
    TileCopy copy{};
    std::memcpy(&copy.map, map, sizeof copy.map);
    if (copy.map.magic != kMapMagic) fail("the tensor map is damaged");
    if (copy.map.rank != rank) fail("a copy of rank %u through a tensor map of rank %u", rank, copy.map.rank);
    const u32 width = copy.map.box[0];
    if (width != 128 && width != 64) fail("a swizzle is as wide as its box: 64 or 128 bytes, got %u", width);
    u32 rows = 1;
    for (u32 d = 1; d < rank; ++d) rows *= copy.map.box[d];
    std::memcpy(copy.coords, coords, rank * sizeof(int));
    if (coords[0] % 16 != 0) fail("a tensor copy at byte %d of a row: not a multiple of 16", coords[0]);
    check_shared(tile, rows * width, 128, "tensor copy");
    check_shared(full, 8, 8, "the mbarrier of a tensor copy");
    copy.tile = shared_address(tile);
    copy.barrier = shared_address(full);
    for (u32 block : blocks) {
        copy.block = block;
        start_copy(copy, rows, at);
    }
}

void load_tile(void* tile, const void* map, u64* full, u32 rank, const int* coords) {
    load_tile_to(tile, map, full, rank, coords, {machine.current->block}, HERE);
}

// ".multicast::cluster copies to the same CTA-relative offset in each destination CTA, and signals the mbarrier at the
// same offset there."
void load_tile_multicast(void* tile, const void* map, u64* full, u32 rank, const int* coords, u32 blocks) {
    std::vector<u32> targets;
    for (; blocks != 0; blocks &= blocks - 1) targets.push_back(block_in_cluster(u32(__builtin_ctz(blocks))));
    load_tile_to(tile, map, full, rank, coords, targets, HERE);
}

}  // namespace emu
