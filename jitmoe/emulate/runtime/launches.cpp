// Launches of a stream, each a programmatic dependent of the one before it. How many blocks fit a GPU is not modelled:
// a launch that may start does, a random time later.
#include <sys/mman.h>

#include <utility>

#include "machine.h"

namespace emu {

// From a few steps to more than most launches take.
static void some_time_later(std::function<void()> work) { later(1u << machine.random.below(18), std::move(work)); }

static Fiber* first_fiber(const Grid& grid) { return &machine.fibers[grid.first_block * machine.num_threads]; }

// Clusters start whole, each when there is room for it.
static void start_blocks(const Grid& grid) {
    hold_at_random(machine.streams[grid.stream]);
    const u32 num_fibers = machine.cluster_size * machine.num_threads;
    for (u32 i = 0; i < grid.num_blocks / machine.cluster_size; ++i) {
        some_time_later([=, fibers = first_fiber(grid) + i * num_fibers] {
            machine.progress += 1;
            for (u32 f = 0; f < num_fibers; ++f) {
                fibers[f].waiting = {};
                wake(&fibers[f]);
            }
        });
    }
}

static void write_late(const Late& late) {
    const Region& region = machine.regions[late.region];
    u8* mapped = region.begin - region.lead;
    const u64 num_mapped = region.lead + region.num_bytes;
    mprotect(mapped, num_mapped, PROT_READ | PROT_WRITE);
    std::memcpy(region.begin, late.contents.data(), region.num_bytes);
    if (!region.writable) mprotect(mapped, num_mapped, PROT_READ);
    for (u64 at = 0; at + 4 <= region.num_bytes; at += 4) wake_pollers(false, region.begin + at);
}

// The launch `distance` behind this one in its stream, if there is one.
static Grid* neighbour(const Grid& grid, i64 distance) {
    const std::vector<u32>& grids = machine.streams[grid.stream].grids;
    const i64 launch = grid.launch + distance;
    return launch < 0 || launch >= i64(grids.size()) ? nullptr : &machine.grids[grids[launch]];
}

static void end_if_due(const Grid& grid);

// All before this launch is over.
static void set_free(Grid& grid) {
    Fiber* const running = std::exchange(machine.current, nullptr);  // no thread of ours writes late contents
    grid.before = end_launches_before(grid);
    for (const Late& late : grid.late) write_late(late);
    machine.current = running;
    machine.progress += 1;
    grid.is_free = true;
    end_expiry();
    Fiber* const fibers = first_fiber(grid);
    const Grid* const before = neighbour(grid, -1);
    const bool starts_now = before && !before->asked_for_next;
    for (u32 i = 0; i < grid.num_blocks * machine.num_threads; ++i) {
        if (starts_now) acquire(fibers[i], grid.before);
        if (fibers[i].waiting.kind == Waiting::kEnd) wake(&fibers[i]);
    }
    if (starts_now) start_blocks(grid);
    end_if_due(grid);
}

// A launch has ended when its threads have exited, its bulk stores have landed, and those before it have ended.
static void end_if_due(const Grid& grid) {
    Grid* const next = neighbour(grid, 1);
    if (!grid.is_free || grid.num_live != 0 || !next) return;
    some_time_later([=, &grid] {
        land_stores(grid);
        set_free(*next);
    });
}

void start_streams() {
    for (Grid& grid : machine.grids) {
        grid.num_live = grid.num_blocks * machine.num_threads;
        if (grid.launch > 0) continue;
        if (grid.late.empty()) {
            grid.is_free = true;
        } else {
            some_time_later([&] { set_free(grid); });
        }
    }
}

// "Signals that specific dependents can be scheduled as soon as all other CTAs in the grid issue the same instruction
// or have completed." If no CTA issues it, the next launch starts when this one has ended, as any launch does.
static void let_next_start(Block& block) {
    if (block.lets_next_start) return;
    block.lets_next_start = true;
    machine.progress += 1;
    Grid& grid = machine.grids[block.grid];
    grid.num_letting_next_start += 1;
    if (!grid.asked_for_next || grid.num_letting_next_start < grid.num_blocks) return;
    if (const Grid* const next = neighbour(grid, 1)) start_blocks(*next);
}

void start_next_launch() {
    maybe_switch();
    machine.grids[machine.block().grid].asked_for_next = true;
    let_next_start(machine.block());
}

// ".wait causes the executing thread to wait until all prerequisite grids in flight have completed and all the memory
// operations from the prerequisite grids are performed and made visible to the current grid."
void wait_for_previous_launch() {
    maybe_switch();
    const Grid& grid = machine.grids[machine.block().grid];
    while (!grid.is_free) block_on({Waiting::kEnd, nullptr, 0, 0, ""});
    acquire(*machine.current, grid.before);
}

void thread_exited(const Fiber& fiber) {
    Block& block = machine.blocks[fiber.block];
    if (block.num_live == 0) let_next_start(block);
    Grid& grid = machine.grids[block.grid];
    grid.num_live -= 1;
    end_if_due(grid);
}

}  // namespace emu
