// Where threads meet: warp-wide operations, barriers of a block, the register split.
#include "machine.h"

namespace emu {

static Fiber* lanes_of(u32 block, u32 warp) { return &machine.fibers[block * machine.num_threads + warp * kWarpLanes]; }

static void finish_if_complete(u32 block_idx, u32 warp_idx) {
    Block& block = machine.blocks[block_idx];
    Warp& warp = block.warps[warp_idx];
    Collective& c = warp.collective;
    if (c.name == nullptr || (c.mask & ~(c.arrived | warp.exited)) != 0) return;
    Fiber* lanes = lanes_of(block_idx, warp_idx);
    warp.finish(block, warp, lanes);
    c.name = nullptr;
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
        if (c.arrived >> lane & 1) wake(&lanes[lane]);
    }
}

// "All non-exited threads in mask must execute the same instruction with the same mask, or the result is undefined."
void meet(const char* name, u32 mask, u32 argument, u32 line, const Lane& lane, Finish finish) {
    maybe_switch();
    Fiber* self = machine.current;
    Warp& warp = machine.warp();
    Collective& c = warp.collective;
    const u32 bit = 1u << self->lane();
    if ((mask & bit) == 0) fail("%s with mask %08x, which leaves out the lane itself", name, mask);
    if (c.name == nullptr) {
        c.name = name;
        c.mask = mask;
        c.argument = argument;
        c.line = line;
        c.arrived = 0;
        warp.finish = finish;
    } else if (c.name != name || c.mask != mask || c.argument != argument || c.line != line) {
        fail(
            "the warp diverges: %s (mask %08x, argument %u, line %u) while lanes %08x are at %s (mask %08x, argument "
            "%u, line %u)",
            name, mask, argument, line, c.arrived, c.name, c.mask, c.argument, c.line);
    }
    c.values[self->lane()] = lane.value;
    c.sources[self->lane()] = lane.source;
    c.addresses[self->lane()] = lane.address;
    c.data[self->lane()] = lane.data;
    c.at = lane.at;
    c.arrived |= bit;
    if ((mask & ~(c.arrived | warp.exited)) == 0) {
        finish_if_complete(self->block, self->warp());
        maybe_switch();
    } else {
        block_on({Waiting::kWarp, nullptr, 0, 0, name});
    }
}

// "bar.warp.sync guarantees memory ordering among participating threads." Shuffles and votes do not.
static void finish_sync_warp(Block&, Warp& warp, Fiber* lanes) {
    std::vector<Fiber*> there;
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
        if (warp.collective.arrived >> lane & 1) there.push_back(&lanes[lane]);
    }
    meet_clocks(there);
}

void sync_warp(u32 mask) { meet("__syncwarp", mask, 0, 0, {}, finish_sync_warp); }

static void finish_shuffle(Block&, Warp& warp, Fiber* lanes) {
    const Collective& c = warp.collective;
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
        if ((c.arrived >> lane & 1) == 0) continue;
        u32 from = c.sources[lane] % kWarpLanes;
        if (c.argument == kUp) from = lane >= c.sources[lane] ? lane - c.sources[lane] : lane;
        if (c.argument == kXor) from = (lane ^ c.sources[lane]) % kWarpLanes;
        if ((c.arrived >> from & 1) == 0) fail("a shuffle from lane %u, which does not take part", from);
        lanes[lane].result = c.values[from];
    }
}

u32 shuffle(Shuffle kind, u32 mask, u32 value, u32 argument, u32 line) {
    static const char* const kNames[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_xor_sync"};
    meet(kNames[kind], mask, kind, line, {value, argument}, finish_shuffle);
    return machine.current->result;
}

static void finish_ballot(Block&, Warp& warp, Fiber* lanes) {
    const Collective& c = warp.collective;
    u32 votes = 0;
    for (u32 lane = 0; lane < kWarpLanes; ++lane) votes |= (c.arrived >> lane & c.values[lane]) << lane;
    for (u32 lane = 0; lane < kWarpLanes; ++lane) lanes[lane].result = votes;
}

u32 ballot(u32 mask, bool predicate, u32 line) {
    meet("__ballot_sync", mask, 0, line, {predicate}, finish_ballot);
    return machine.current->result;
}

static void finish_make_uniform(Block&, Warp& warp, Fiber* lanes) {
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
        if (warp.collective.values[lane] != warp.collective.values[0])
            fail("make_uniform: lanes have different values");
        lanes[lane].result = warp.collective.values[0];
    }
}

u32 make_uniform(u32 value) {
    meet("redux.sync.or", kAllLanes, 0, 0, {value}, finish_make_uniform);
    return machine.current->result;
}

// stmatrix: "thread 8 i + r holds the address of row r of matrix i"; its fragment gives lane l elements 2 (l % 4) and +
// 1 of row l / 4. With .trans address r receives column r. Each lane writes what it brings: only a barrier shows it to
// the lane whose row it is.
template <bool kTransposed>
static void finish_store_matrices(Block&, Warp& warp, Fiber* lanes) {
    const Collective& c = warp.collective;
    for (u32 i = 0; i < c.argument; ++i) {
        for (u32 r = 0; r < 8; ++r) {
            u16* row = static_cast<u16*>(c.addresses[8 * i + r]);
            check_shared(row, 16, 16, "stmatrix");
            for (u32 k = 0; k < 8; ++k) {
                const u32 y = kTransposed ? k : r, x = kTransposed ? r : k, from = y * 4 + x / 2;
                check_access(row + k, 2, Access::kWrite, warp.collective.at, lanes[from]);
                row[k] = u16(c.data[from][i] >> x % 2 * 16);
            }
        }
    }
}

void store_matrices(void* row, const u32* matrices, u32 count, bool transposed) {
    Lane lane{0, 0, row, matrices};
    lane.at = __builtin_return_address(0);
    if (transposed) {
        meet("stmatrix.trans", kAllLanes, count, 0, lane, finish_store_matrices<true>);
    } else {
        meet("stmatrix", kAllLanes, count, 0, lane, finish_store_matrices<false>);
    }
}

// ldmatrix, with addresses and fragments as stmatrix has them. Each lane reads what it gets.
static void finish_load_matrices(Block&, Warp& warp, Fiber* lanes) {
    const Collective& c = warp.collective;
    for (u32 i = 0; i < c.argument; ++i) {
        for (u32 r = 0; r < 8; ++r) {
            const u32* row = static_cast<const u32*>(c.addresses[8 * i + r]);
            check_shared(row, 16, 16, "ldmatrix");
            for (u32 k = 0; k < 4; ++k) {
                const u32 to = r * 4 + k;
                check_access(row + k, 4, Access::kRead, warp.collective.at, lanes[to]);
                const_cast<u32*>(c.data[to])[i] = row[k];
            }
        }
    }
}

void load_matrices(const void* row, u32* matrices, u32 count) {
    Lane lane{0, 0, const_cast<void*>(row), matrices};
    lane.at = __builtin_return_address(0);
    meet("ldmatrix", kAllLanes, count, 0, lane, finish_load_matrices);
}

// Barriers of a block. "The arrival count is incremented by the warp size, not by the number of active threads"; a
// barrier completes when it reaches the count given, or with sync_block the count of all warps that have not exited.
static bool complete_if_all_there(u32 block_idx, u32 id) {
    Block& block = machine.blocks[block_idx];
    NamedBarrier& barrier = block.named[id];
    if (barrier.waiters.empty()) return false;
    u32 arrived = 0, live = 0;
    for (u32 w = 0; w < block.warps.size(); ++w) {
        const u32 exited = block.warps[w].exited;
        if (exited != kAllLanes) live += kWarpLanes;
        if (barrier.arrived[w] != 0 && (barrier.arrived[w] | exited) == kAllLanes) arrived += kWarpLanes;
    }
    const u32 expected = id == 0 ? live : barrier.num_threads;
    if (arrived > expected) fail("%u threads at named barrier %u, which is for %u", arrived, id, expected);
    if (arrived < expected) return false;
    for (u32& lanes : barrier.arrived) lanes = 0;
    const std::vector<Fiber*> waiters = std::move(barrier.waiters);
    barrier.waiters.clear();
    machine.progress += 1;
    meet_clocks(waiters);
    for (Fiber* fiber : waiters) wake(fiber);
    return true;
}

static void sync(u32 id, u32 num_threads) {
    maybe_switch();
    Fiber* self = machine.current;
    NamedBarrier& barrier = machine.block().named[id];
    if (barrier.waiters.empty()) {
        barrier.num_threads = num_threads;
        barrier.arrived.assign(machine.block().warps.size(), 0);
    } else if (barrier.num_threads != num_threads) {
        fail("named barrier %u for %u threads, others are there for %u", id, num_threads, barrier.num_threads);
    }
    barrier.arrived[self->warp()] |= 1u << self->lane();
    barrier.waiters.push_back(self);
    if (complete_if_all_there(self->block, id)) {
        maybe_switch();
    } else {
        block_on({Waiting::kNamed, nullptr, id, num_threads, ""});
    }
}

void sync_block() { sync(0, machine.num_threads); }

void sync_named(u32 id, u32 num_threads) {
    if (id == 0 || id > 15) fail("named barriers are 1 to 15, got %u", id);
    if (num_threads == 0 || num_threads % kWarpLanes != 0 || num_threads > machine.num_threads) {
        fail("a named barrier is for whole warps, got %u threads", num_threads);
    }
    sync(id, num_threads);
}

// setmaxnreg: "inc blocks until enough registers are available in the block's pool; dec releases them." Warps are
// served in any order.
static void grant_registers(u32 block_idx) {
    Block& block = machine.blocks[block_idx];
    for (u32 w = 0; w < block.warps.size(); ++w) {
        Warp& warp = block.warps[w];
        const u32 wanted = (warp.wanted_regs - warp.regs) * kWarpLanes;
        if (warp.wanted_regs <= warp.regs || wanted > block.free_regs) continue;
        block.free_regs -= wanted;
        warp.regs = warp.wanted_regs;
        machine.progress += 1;
        for (u32 lane = 0; lane < kWarpLanes; ++lane) {
            Fiber* fiber = &lanes_of(block_idx, w)[lane];
            if (fiber->waiting.kind == Waiting::kRegisters) wake(fiber);
        }
    }
}

static void finish_set_registers(Block& block, Warp& warp, Fiber* lanes) {
    const u32 regs = warp.collective.argument;
    if (warp.wanted_regs != 0) fail("setmaxnreg twice in one warp");
    warp.wanted_regs = regs;
    if (regs < warp.regs) {
        block.free_regs += (warp.regs - regs) * kWarpLanes;
        warp.regs = regs;
    }
    grant_registers(lanes[0].block);
}

void set_registers(u32 launch_regs, u32 regs) {
    if (regs % 8 != 0 || regs < 24 || regs > 256) fail("setmaxnreg %u: not a multiple of 8 in 24..256", regs);
    if (launch_regs * machine.num_threads > kRegisterFile) fail("a launch with %u registers a thread", launch_regs);
    Warp& warp = machine.warp();
    if (warp.regs == 0) warp.regs = launch_regs;
    meet("setmaxnreg", kAllLanes, regs, 0, {}, finish_set_registers);
    while (warp.regs != regs) block_on({Waiting::kRegisters, nullptr, regs, 0, ""});
}

// "setmaxnreg must be executed by all warps of a warpgroup."
void check_registers() {
    for (u32 b = 0; b < machine.num_blocks; ++b) {
        if (machine.streams[machine.grid_of(b).stream].is_killed) continue;
        const auto& warps = machine.blocks[b].warps;
        for (u32 w = 0; w < warps.size(); ++w) {
            if (warps[w].wanted_regs != warps[w / 4 * 4].wanted_regs) {
                fail("setmaxnreg differs in warps %u and %u of a warpgroup", w / 4 * 4, w);
            }
        }
    }
}

void lane_exited(Fiber& fiber) {
    Block& block = machine.blocks[fiber.block];
    Warp& warp = block.warps[fiber.warp()];
    if (wgmma_in_flight(warp)) fail("exit with matrix multiplies in flight");
    if (may_read_shared(fiber) && !machine.has_expired)
        fail("exit with bulk stores that may not have read their shared memory");
    if (may_read_source(warp) && !machine.has_expired)
        fail("exit with puts that may not have read their source: a flush is missing");
    warp.exited |= 1u << fiber.lane();
    block.num_live -= 1;
    finish_if_complete(fiber.block, fiber.warp());
    for (u32 id = 0; id < 16; ++id) complete_if_all_there(fiber.block, id);
    complete_cluster(machine.cluster_of(fiber.block));
}

}  // namespace emu
