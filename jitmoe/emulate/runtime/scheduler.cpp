// Threads of all blocks as fibers of one operating-system thread, and who runs next: a matter of the seed.
#include <sys/mman.h>

#include <cstdarg>

#include "machine.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {

Machine machine;
Place here;

constexpr u64 kStackBytes = 128 << 10, kGuardBytes = 4096;
// A guard makes two mappings, of which Linux allows 65,530; the heap cannot grow when they are used up.
constexpr u32 kMaxGuards = 24 << 10;
constexpr u64 kClockStepNs = 4;

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack (System V ABI); stores and loads the stack pointer.
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, .-emu_switch
)");

static void* new_stack_frame(u8* top, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(top);  // a multiple of 16
    *--sp = nullptr;  // the return address of entry, which never returns; keeps its frame aligned
    *--sp = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    return sp;
}
#else
static void* new_stack_frame(u8* top, void (*entry)()) {
    ucontext_t* context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = top - kStackBytes;
    context->uc_stack.ss_size = kStackBytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}

static void emu_switch(void** save, void* load) {
    if (*save == nullptr) *save = new ucontext_t;
    swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}
#endif

struct Event {
    u64 due, number;
    std::function<void()> work;
    bool operator<(const Event& other) const {  // the earliest is on top
        return due != other.due ? due > other.due : number > other.number;
    }
};

static std::vector<Fiber*> ready;
static std::priority_queue<Event> events;
static u64 num_events, progress_at_retry = ~0ull;
static u64 progress_seen, quiet_since;
// Once the clock runs out, waits look at it in every 128th of their polls, among all that polls without a clock.
constexpr u64 kQuietSteps = 1 << 14, kStallSteps = 1 << 21, kExpiringSteps = 1 << 24;
static void* main_stack_pointer;
static void (*kernel)(const void*);

static void switch_to(void** save, Fiber* next) {
    machine.current = next;
    machine.counters.switches += 1;
    if (next == nullptr) {
        emu_switch(save, main_stack_pointer);
    } else {
        const Grid& grid = machine.grid_of(next->block);
        here = {next->thread, next->block - grid.first_block, grid.num_blocks};
        emu_switch(save, next->stack_pointer);
    }
}

std::string place_name(const Fiber& fiber) {
    std::string role = "warp";
    for (const RoleRange& range : machine.roles) {
        if (range.begin <= fiber.warp() && fiber.warp() < range.end) role = range.name + " warp";
    }
    return role + " " + std::to_string(fiber.warp()) + " of " + block_name(fiber.block);
}

std::string block_name(u32 block) {
    const Grid& grid = machine.grid_of(block);
    std::string name = "block " + std::to_string(block - grid.first_block);
    if (machine.grids.size() > machine.streams.size()) name += " of launch " + std::to_string(grid.launch);
    if (machine.streams.size() > 1) name += " of rank " + std::to_string(machine.streams[grid.stream].number);
    return name;
}

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::printf("error: ");
    std::vprintf(format, arguments);
    if (machine.current) {
        std::printf(" (%s, lane %u)", place_name(*machine.current).c_str(), machine.current->lane());
    }
    std::printf("\nseed %llu, step %llu\n", machine.seed, machine.step);
    std::fflush(stdout);
    std::_Exit(4);
}

static std::string describe_flag(const void* flag, u32 num_bytes) {
    char text[400];
    const u64 value = num_bytes == 8 ? *static_cast<const u64*>(flag) : *static_cast<const u32*>(flag);
    std::snprintf(text, sizeof text, "flag %s, which holds %llu", address_name(flag).c_str(), value);
    return text;
}

static std::string describe(const Fiber& fiber, bool all_poll) {
    const Waiting& w = fiber.waiting;
    const bool may_poll = w.kind == Waiting::kWarp || w.kind == Waiting::kNothing;
    if (all_poll && may_poll && fiber.last_loaded) return describe_flag(fiber.last_loaded, fiber.last_bytes);
    char text[400];
    switch (w.kind) {
        case Waiting::kMbarrier:
            return describe_mbarrier(fiber.block, w.object, w.a);
        case Waiting::kFlag:
            return describe_flag(w.object, w.a);
        case Waiting::kWarp: {
            const Warp& warp = machine.blocks[fiber.block].warps[fiber.warp()];
            std::snprintf(text, sizeof text, "the other lanes at %s (mask %08x, arrived %08x)", warp.collective.name,
                          warp.collective.mask, warp.collective.arrived);
            return text;
        }
        case Waiting::kNamed: {
            u32 arrived = 0;
            for (u32 lanes : machine.blocks[fiber.block].named[w.a].arrived) arrived += __builtin_popcount(lanes);
            std::snprintf(text, sizeof text, "named barrier %u: %u of %u threads arrived", w.a, arrived, w.b);
            return text;
        }
        case Waiting::kCluster:
            std::snprintf(text, sizeof text, "the barrier of its cluster, where %u threads are",
                          num_at_cluster_barrier(w.a));
            return text;
        case Waiting::kRegisters:
            std::snprintf(text, sizeof text, "registers: wants %u a thread, the block has %u left", w.a,
                          machine.blocks[fiber.block].free_regs);
            return text;
        case Waiting::kStart: {
            const Grid& grid = machine.grid_of(fiber.block);
            const Grid& before = machine.grids[machine.streams[grid.stream].grids[grid.launch - 1]];
            std::snprintf(text, sizeof text, "the launch before it to let it start: %u of %u blocks do",
                          before.num_letting_next_start, before.num_blocks);
            return text;
        }
        case Waiting::kEnd:
            return "the launch before it to end";
        default:
            return "nothing";
    }
}

static void report_stall(bool all_poll) {
    std::printf("stall: nothing %s any more (seed %llu, step %llu)\n", all_poll ? "changes" : "can run", machine.seed,
                machine.step);
    const u32 num_warps = machine.num_threads / kWarpLanes;
    for (u32 warp = 0; warp < num_warps * machine.num_blocks; ++warp) {
        const Fiber* lanes = &machine.fibers[warp * kWarpLanes];
        std::map<std::string, u32> waits;
        for (u32 lane = 0; lane < kWarpLanes; ++lane) {
            if (!lanes[lane].is_over()) waits[describe(lanes[lane], all_poll)] |= 1u << lane;
        }
        for (const auto& [what, mask] : waits) {
            std::printf("  %s", place_name(lanes[0]).c_str());
            if (mask != kAllLanes) std::printf(" (lanes %08x)", mask);
            std::printf(" waits for %s\n", what.c_str());
        }
    }
    std::fflush(stdout);
}

static void stall(bool all_poll) {
    report_stall(all_poll);
    if (!machine.expire || machine.expired || !(all_poll || any_pollers())) std::_Exit(3);
    machine.expired = machine.has_expired = true;
    machine.stalled_at = machine.step;
    wake_pollers(true, nullptr);
}

// For how many steps nothing has changed that can be awaited: threads that run only poll, in ways that do not put them
// to sleep, as when a warp votes on what its lanes load.
static u64 quiet_steps() {
    if (machine.progress != progress_seen || !events.empty()) {
        progress_seen = machine.progress;
        quiet_since = machine.step;
    }
    return machine.step - quiet_since;
}

// No thread is ready and nothing asynchronous is under way. Polls go on for ever on the device: let them look again, in
// case something changed that nobody was woken for, then call it a stall.
static void nothing_ready() {
    if (any_pollers() && (machine.expired || machine.progress != progress_at_retry)) {
        progress_at_retry = machine.progress;
        wake_pollers(true, nullptr);
        return;
    }
    stall(false);
}

static Fiber* pick() {
    for (;;) {
        machine.step += 1;
        if (machine.step >= machine.killed_at) kill_stream();
        const u64 quiet = quiet_steps();
        if (quiet > (machine.expired ? kExpiringSteps : kStallSteps)) {
            stall(true);
            quiet_since = machine.step;
        }
        if (!events.empty() && (ready.empty() || events.top().due <= machine.step)) {
            if (events.top().due > machine.step) machine.step = events.top().due;
            const auto work = std::move(const_cast<Event&>(events.top()).work);
            events.pop();
            work();
        } else if (ready.empty()) {
            if (machine.num_exited == machine.fibers.size()) return nullptr;
            nothing_ready();
        } else {
            const bool last = machine.random.below(100) < machine.locality_percent;
            u32 index = last ? ready.size() - 1 : machine.random.below(ready.size());
            for (u32 i = 0; i < 64 && quiet < kQuietSteps && ready[index]->is_starved; ++i)
                index = machine.random.below(ready.size());
            Fiber* fiber = ready[index];
            ready[index] = ready.back();
            ready.pop_back();
            if (!keeps(fiber)) return fiber;
        }
    }
}

static void run_others() {
    Fiber* self = machine.current;
    Fiber* next = pick();
    if (next != self) switch_to(&self->stack_pointer, next);
}

void maybe_switch() {
    Fiber* self = machine.current;
    self->polled = nullptr;
    if (!machine.random.one_in(machine.switch_one_in)) return;
    ready.push_back(self);
    run_others();
}

void block_on(const Waiting& waiting) {
    Fiber* self = machine.current;
    self->state = Fiber::kBlocked;
    self->waiting = waiting;
    run_others();
    self->waiting = {};
}

void wake(Fiber* fiber) {
    if (fiber->state != Fiber::kBlocked) return;
    fiber->state = Fiber::kReady;
    make_ready(fiber);
}

void make_ready(Fiber* fiber) { ready.push_back(fiber); }

void later(u32 max_delay, std::function<void()> work) {
    events.push({machine.step + 1 + machine.random.below(max_delay), num_events++, std::move(work)});
}

// After a stall time flies, so that every wait runs out of its budget, whenever it began.
u64 clock_ns() {
    const u64 flies = machine.expired ? (machine.step - machine.stalled_at) << 24 : 0;
    return machine.step * kClockStepNs + machine.flown_ns + flies;
}

void end_expiry() {
    machine.flown_ns = clock_ns() - machine.step * kClockStepNs;
    machine.expired = false;
}

u64 clock_steps() { return machine.step; }

void exit_thread() {
    Fiber* self = machine.current;
    self->state = Fiber::kExited;
    machine.num_exited += 1;
    machine.progress += 1;
    lane_exited(*self);
    thread_exited(*self);
    run_others();
    std::abort();
}

static void fiber_main() {
    kernel(machine.grids[machine.block().grid].params.get());
    exit_thread();
}

// A seed also picks the manner of play, so that few seeds see many kinds of schedule.
static void choose_manner() {
    static const u32 kSwitch[] = {2, 8, 64}, kLocality[] = {0, 50, 95}, kDelay[] = {16, 512, 16384};
    static const u32 kLate[] = {0, 50, 100};
    static const u32 kStarved[] = {0, 0, 2, 16};
    machine.random.state = machine.seed;
    machine.switch_one_in = kSwitch[machine.random.below(3)];
    machine.locality_percent = kLocality[machine.random.below(3)];
    machine.max_delay = kDelay[machine.random.below(3)];
    machine.late_percent = kLate[machine.random.below(3)];
    machine.starved_one_in = kStarved[machine.random.below(4)];
    machine.starved_threads = machine.random.one_in(2) ? kWarpLanes : 1;
}

void start(void (*the_kernel)(const void*)) {
    kernel = the_kernel;
    choose_manner();
    const u32 num_fibers = machine.num_blocks * machine.num_threads;
    void* stacks = mmap(nullptr, num_fibers * (kStackBytes + kGuardBytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail("no memory for the stacks of %u threads", num_fibers);
    machine.fibers.resize(num_fibers);
    bool is_starved = false;
    for (u32 i = 0; i < num_fibers; ++i) {
        u8* stack = static_cast<u8*>(stacks) + i * (kStackBytes + kGuardBytes);
        if (i < kMaxGuards) mprotect(stack, kGuardBytes, PROT_NONE);
        Fiber& fiber = machine.fibers[i];
        fiber.thread = i % machine.num_threads;
        fiber.block = i / machine.num_threads;
        if (i % machine.starved_threads == 0) {
            is_starved = machine.starved_one_in && machine.random.one_in(machine.starved_one_in);
        }
        fiber.is_starved = is_starved;
        fiber.stack_pointer = new_stack_frame(stack + kGuardBytes + kStackBytes, fiber_main);
        if (machine.grid_of(fiber.block).launch > 0) {
            fiber.state = Fiber::kBlocked;
            fiber.waiting.kind = Waiting::kStart;
        } else {
            ready.push_back(&fiber);
        }
    }
    start_checking();
    start_streams();
    start_delays();
    switch_to(&main_stack_pointer, pick());
    machine.current = nullptr;
    check_registers();
}

}  // namespace emu
