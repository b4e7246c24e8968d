// The checked build: every access of kernel text to memory that blocks or threads share, and whether the orderings of
// the PTX memory model, and nothing else, put it behind the accesses it conflicts with. The compiler's ThreadSanitizer
// pass reports the accesses (__tsan_*, at the end); the clocks are kept here, because ThreadSanitizer's own runtime
// knows one kind of happens-before and the device has one for each proxy.
#include "machine.h"

namespace emu {

// One agent for every thread, and for what works beside it: its cp.async copies, its tensor and bulk copies, the matrix
// multiplies of its warp. An epoch is a stretch of an agent's life between two of its releases.
struct Agent {
    u32 fiber;
    const char* kind;
};

const char kBulkCopy[] = "the async proxy";

static std::vector<Agent> agents;
static std::vector<Clocks> threads;  // what each thread knows to have happened
static const u32 kNoAgent = ~0u;

void Clock::know(u32 agent, u32 epoch) {
    if (epochs.size() <= agent) epochs.resize(agent + 1);
    if (epochs[agent] < epoch) epochs[agent] = epoch;
}

void Clock::join(const Clock& other) {
    if (epochs.size() < other.epochs.size()) epochs.resize(other.epochs.size());
    u32* mine = epochs.data();
    const u32* theirs = other.epochs.data();
    for (u32 i = 0; i < other.epochs.size(); ++i) mine[i] = mine[i] < theirs[i] ? theirs[i] : mine[i];
}

void Clocks::join(const Clocks& other) {
    for (u32 view = 0; view < kNumViews; ++view) views[view].join(other.views[view]);
}

void Clocks::clear() {
    for (Clock& view : views) view.epochs.clear();
}

static Clocks& clocks_of(const Fiber& fiber) { return threads[&fiber - machine.fibers.data()]; }

static u32 epoch_of(u32 agent) { return threads[agent].views[kGenericView].epochs[agent]; }

static void begin_epoch(const Fiber& fiber) {
    const u32 agent = u32(&fiber - machine.fibers.data());
    threads[agent].views[kGenericView].epochs[agent] += 1;
}

void start_checking() {
    if (!machine.checked) return;
    const u32 num_threads = u32(machine.fibers.size());
    threads.resize(num_threads);
    for (u32 i = 0; i < num_threads; ++i) {
        agents.push_back({i, ""});
        threads[i].views[kGenericView].know(i, 1);
    }
}

void release(const Fiber& fiber, Clocks& to) {
    if (!machine.checked) return;
    to.join(clocks_of(fiber));
    begin_epoch(fiber);
}

void acquire(const Fiber& fiber, const Clocks& from) {
    if (machine.checked) clocks_of(fiber).join(from);
}

void meet_clocks(const std::vector<Fiber*>& fibers) {
    if (!machine.checked) return;
    Clocks all;
    for (const Fiber* fiber : fibers) all.join(clocks_of(*fiber));
    for (const Fiber* fiber : fibers) {
        clocks_of(*fiber) = all;
        begin_epoch(*fiber);
    }
}

// "A proxy fence is required to synchronize across different proxies": what this thread knows of the generic proxy, the
// async proxy now knows.
void fence_proxy(View view) {
    if (!machine.checked) return;
    Clocks& mine = clocks_of(*machine.current);
    mine.views[view].join(mine.views[kGenericView]);
    begin_epoch(*machine.current);
}

AsyncAgent new_agent(const char* kind) {
    agents.push_back({u32(machine.current - machine.fibers.data()), kind});
    return {u32(agents.size() - 1), 1};
}

void release_async(const AsyncAgent& agent, bool is_generic, Clocks& to) {
    if (!machine.checked) return;
    to.views[kGenericView].know(agent.index, agent.epoch);
    if (is_generic) return;
    to.views[kAsyncSharedView].know(agent.index, agent.epoch);
    to.views[kAsyncGlobalView].know(agent.index, agent.epoch);
}

void acquire_async(const Fiber& fiber, const AsyncAgent& agent) {
    if (machine.checked) release_async(agent, false, clocks_of(fiber));
}

// Shadow of one byte: the last write, and what came after it.
struct Record {
    u32 agent = kNoAgent, epoch = 0;
    u32 at = 0, caller = 0;  // addresses of code
};
struct LaterRecord : Record {
    Access access;
};
struct Shadow {
    Record write;
    std::vector<LaterRecord> later;  // plain reads, atomic loads, atomic stores
};
struct Range {
    const u8* begin;
    std::vector<Shadow> bytes;
};
static std::vector<Range> ranges;  // of the blocks, then of the writable arrays

static void make_ranges() {
    for (const Block& block : machine.blocks) ranges.push_back({block.shared, {}});
    for (Range& range : ranges) range.bytes.resize(machine.shared_bytes);
    for (const Region& region : machine.regions) {
        if (!region.writable) continue;
        ranges.push_back({region.begin, {}});
        ranges.back().bytes.resize(region.num_bytes);
    }
}

static Shadow* shadow_of(const void* pointer, u32 num_bytes) {
    if (ranges.empty()) make_ranges();
    const u8* at = static_cast<const u8*>(pointer);
    for (u32 i = 0; i < ranges.size(); ++i) {
        Range& range = ranges[i];
        if (at < range.begin || at + num_bytes > range.begin + range.bytes.size()) continue;
        if (i < machine.blocks.size() && i != machine.current->block) {
            fail("access to the shared memory of block %u", i);
        }
        return &range.bytes[at - range.begin];
    }
    return nullptr;  // an input, or of the thread alone
}

static const char* name_of(Access access) {
    static const char* const kNames[] = {"read", "write", "atomic load", "atomic store"};
    return kNames[u32(access)];
}

// run.py turns <at caller> into a line of a template.
static std::string describe(const char* verb, const Record& record, Access access) {
    const Agent& agent = agents[record.agent];
    const Fiber& fiber = machine.fibers[agent.fiber];
    char text[300];
    std::snprintf(text, sizeof text, "  %s%s by %s%s%s, lane %u, at <%x %x>\n", verb, name_of(access), agent.kind,
                  *agent.kind ? " of " : "", place_name(fiber).c_str(), fiber.lane(), record.at, record.caller);
    return text;
}

static bool reads_garbage(const Record& record, Access access) {
    return access == Access::kRead && agents[record.agent].kind == kBulkCopy;
}

// A tensor copy may bring in rows that others are writing, if nobody uses them: such bytes become garbage instead, and
// the result tells whether they were used.
static std::string first_garbage;
static u64 num_garbage;

// Reports a race and ends, or returns: the read brings garbage.
static void report(const void* pointer, const Record& now, Access access, const Record& before, Access access_before,
                   bool lacks_fence) {
    const std::string text = address_name(pointer) + "\n" + describe("", now, access) +
                             describe("earlier ", before, access_before) +
                             (lacks_fence ? "  ordered in the generic proxy only: a fence.proxy.async is missing\n"
                                          : "  no release and acquire, barrier or completion orders them\n");
    if (!reads_garbage(now, access) && !reads_garbage(before, access_before)) {
        std::printf("data race on %s", text.c_str());
        fail("data race");
    }
    if (num_garbage++ == 0) first_garbage = text;
}

void print_garbage() {
    if (num_garbage == 0) return;
    std::printf("note: %llu bytes that tensor copies read while others wrote them became garbage; the first: %s",
                num_garbage, first_garbage.c_str());
}

// An access to `num_bytes` bytes. It must know of the writes before it in `writes`, and if it writes itself of the reads
// before it in `reads`. False if it brings garbage.
static bool access_bytes(const void* pointer, u32 num_bytes, Access access, const Record& now, const Clock& reads,
                         const Clock& writes, bool is_thread) {
    Shadow* shadow = shadow_of(pointer, num_bytes);
    if (shadow == nullptr) return true;
    bool is_ordered = true;
    const auto check = [&](u32 i, const Record& before, Access access_before, const Clock& known) {
        if (before.agent == kNoAgent || known.knows(before.agent, before.epoch)) return;
        is_ordered = false;
        report(static_cast<const u8*>(pointer) + i, now, access, before, access_before,
               reads.knows(before.agent, before.epoch));
    };
    const bool is_atomic = access == Access::kAtomicLoad || access == Access::kAtomicStore;
    for (u32 i = 0; i < num_bytes; ++i) {
        Shadow& byte = shadow[i];
        check(i, byte.write, Access::kWrite, writes);
        if (access == Access::kWrite) {
            for (const LaterRecord& r : byte.later) check(i, r, r.access, r.access == Access::kAtomicStore ? writes : reads);
            byte.later.clear();
            byte.write = now;
            continue;
        }
        bool is_there = false;
        for (u32 k = 0; k < byte.later.size();) {
            LaterRecord& r = byte.later[k];
            if (access == Access::kRead && r.access == Access::kAtomicStore) check(i, r, r.access, writes);
            if (access == Access::kAtomicStore && r.access == Access::kRead) check(i, r, r.access, reads);
            if (r.agent == now.agent && r.access == access) {
                static_cast<Record&>(r) = now;
                is_there = true;
            } else if (r.access == Access::kRead && is_thread && !is_atomic && reads.knows(r.agent, r.epoch)) {
                r = byte.later.back();  // who comes after this read comes after that one
                byte.later.pop_back();
                continue;
            }
            ++k;
        }
        if (!is_there) {
            byte.later.emplace_back();
            static_cast<Record&>(byte.later.back()) = now;
            byte.later.back().access = access;
        }
    }
    return is_ordered;
}

static u32 code_address(const void* address) { return u32(reinterpret_cast<u64>(address)); }

static u32 caller_of(const Fiber& fiber) { return fiber.num_calls ? fiber.calls[(fiber.num_calls - 1) % kMaxCalls] : 0; }

void check_access(const void* pointer, u32 num_bytes, Access access, const void* at) {
    if (!machine.checked || machine.current == nullptr) return;
    const u32 agent = u32(machine.current - machine.fibers.data());
    const Clock& known = threads[agent].views[kGenericView];
    const Record now{agent, epoch_of(agent), code_address(at), caller_of(*machine.current)};
    access_bytes(pointer, num_bytes, access, now, known, known, true);
}

// Asynchronous work is checked when it is issued, with what its thread knows then: it may happen from now on.
bool check_async_access(const AsyncAgent& agent, const void* pointer, u32 num_bytes, Access access, View view,
                        const void* at) {
    if (!machine.checked) return true;
    const Clocks& known = clocks_of(*machine.current);
    const Record now{agent.index, agent.epoch, code_address(at), caller_of(*machine.current)};
    return access_bytes(pointer, num_bytes, access, now, known.views[kGenericView], known.views[view], false);
}

// Words that order memory. "A release pattern at a location is observed by an acquire pattern there, if their scopes
// include each other"; read-modify-writes continue the release sequence, a relaxed store ends it. What another block's
// async proxy knows does not travel: "when synchronizing threads are in different CTAs, the proxy fence must be in the
// CTA of the non-generic operation" (Lustig et al., Mixed-proxy extensions for the PTX memory model, ISCA 2022).
struct SyncWord {
    Clock grid;                             // releases at gpu and sys scope
    std::unordered_map<u32, Clock> blocks;  // at cta scope, by block
};
static std::unordered_map<const void*, SyncWord> sync_words;

void check_word(const u32* word, bool loads, bool stores, Order order, Scope scope, const void* at) {
    if (!machine.checked) return;
    check_access(word, 4, stores ? Access::kAtomicStore : Access::kAtomicLoad, at);
    const Fiber& self = *machine.current;
    SyncWord& sync = sync_words[word];
    Clock& known = clocks_of(self).views[kGenericView];
    if (loads && (order == kAcquire || order == kAcqRel)) {
        known.join(sync.grid);
        known.join(sync.blocks[self.block]);
    }
    if (!stores) return;
    if (!loads) sync = SyncWord{};
    if (order == kRelease || order == kAcqRel) {
        (scope == kCta ? sync.blocks[self.block] : sync.grid).join(known);
        begin_epoch(self);
    }
}

}  // namespace emu

// What the compiler's ThreadSanitizer pass calls.
extern "C" {

#define EMU_ACCESS(name, num_bytes, access)                                             \
    void name(void* pointer) {                                                          \
        emu::check_access(pointer, num_bytes, access, __builtin_return_address(0));     \
    }
#define EMU_ACCESSES(num_bytes)                                                         \
    EMU_ACCESS(__tsan_read##num_bytes, num_bytes, emu::Access::kRead)                   \
    EMU_ACCESS(__tsan_write##num_bytes, num_bytes, emu::Access::kWrite)                 \
    EMU_ACCESS(__tsan_unaligned_read##num_bytes, num_bytes, emu::Access::kRead)         \
    EMU_ACCESS(__tsan_unaligned_write##num_bytes, num_bytes, emu::Access::kWrite)
EMU_ACCESSES(1)
EMU_ACCESSES(2)
EMU_ACCESSES(4)
EMU_ACCESSES(8)
EMU_ACCESSES(16)

void __tsan_read_range(void* pointer, unsigned long num_bytes) {
    emu::check_access(pointer, emu::u32(num_bytes), emu::Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* pointer, unsigned long num_bytes) {
    emu::check_access(pointer, emu::u32(num_bytes), emu::Access::kWrite, __builtin_return_address(0));
}

void __tsan_func_entry(void* caller) {
    emu::Fiber* self = emu::machine.current;
    if (self) self->calls[self->num_calls++ % emu::kMaxCalls] = emu::code_address(caller);
}
void __tsan_func_exit() {
    if (emu::machine.current) emu::machine.current->num_calls -= 1;
}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
}
