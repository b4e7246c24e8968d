// The checked build: every access of kernel text to memory that blocks or threads share, and whether the orderings of
// the PTX memory model, and nothing else, put it behind the accesses it conflicts with. The compiler's ThreadSanitizer
// pass reports the accesses (__tsan_*, at the end); the clocks are kept here, because ThreadSanitizer's own runtime
// knows one kind of happens-before and the device has one for each proxy.
#include <algorithm>

#include "machine.h"

extern "C" const char __executable_start;  // the linker's

namespace emu {

// One agent for every thread, and for what works beside it: its cp.async copies, its tensor and bulk copies, the matrix
// multiplies of its warp. An epoch is a stretch of an agent's life between two of its releases.
struct Agent {
    u32 fiber;
    const char* kind;
    u32 grid;
};
constexpr u32 kNoFiber = ~0u;  // what wrote late contents of the grid

const char kBulkCopy[] = "the async proxy";
const char kPut[] = "a put";

static std::vector<Agent> agents;
static const u32 kNoAgent = ~0u;

// What a thread knows to have happened, in each view, and its own epoch there.
struct Thread {
    SharedClock known[kNumViews];
    u32 own[kNumViews] = {};
    std::map<Scope, Message> fenced;  // what its relaxed stores release: what it knew at its last fence of that scope
    std::map<Scope, Message> seen;    // what its relaxed loads saw released: a fence of that scope acquires it
};
static std::vector<Thread> threads;

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

void Clock::join(const SharedClock& other) {
    if (other == last) return;
    join(*other);
    last = other;
}

void Message::join(const Message& other) {
    generic.join(other.generic);
    network.join(other.network);
}

static bool includes(const Clock& clock, const Clock& other) {
    for (u32 i = 0; i < other.epochs.size(); ++i) {
        if (!clock.knows(i, other.epochs[i])) return false;
    }
    return true;
}

// The lanes of a warp join the same clocks one after another: they get one result.
static SharedClock joined(const SharedClock& a, const SharedClock& b) {
    struct Join {
        SharedClock a, b, result;
    };
    static Join recent[8];
    static u32 next;
    if (a == b || b == nullptr) return a;
    for (const Join& join : recent) {
        if (join.a == a && join.b == b) return join.result;
    }
    SharedClock result = a;
    if (!includes(*a, *b)) {
        auto both = std::make_shared<Clock>();
        both->epochs = a->epochs;
        both->join(*b);
        result = both;
    }
    recent[next++ % 8] = {a, b, result};
    return result;
}

static u32 agent_of(const Fiber& fiber) { return u32(&fiber - machine.fibers.data()); }

static void begin_epoch(const Fiber& fiber) { threads[agent_of(fiber)].own[kGenericView] += 1; }

void start_checking() {
    if (!machine.checked) return;
    threads.resize(machine.fibers.size());
    const auto nothing = std::make_shared<const Clock>();
    for (u32 i = 0; i < threads.size(); ++i) {
        agents.push_back({i, "", machine.blocks[machine.fibers[i].block].grid});
        for (SharedClock& known : threads[i].known) known = nothing;
        threads[i].own[kGenericView] = 1;
    }
}

SharedClocks share(Clocks&& clocks) {
    SharedClocks shared;
    for (u32 view = 0; view < kNumViews; ++view) {
        clocks.views[view].last.reset();
        shared.views[view] = std::make_shared<const Clock>(std::move(clocks.views[view]));
    }
    return shared;
}

static void tell(const Fiber& fiber, View view, Clock& to) {
    const u32 agent = agent_of(fiber), own = threads[agent].own[view];
    to.join(threads[agent].known[view]);
    if (own != 0) to.know(agent, own);
}

void release(const Fiber& fiber, Clocks& to) {
    if (!machine.checked) return;
    for (u32 view = 0; view < kNumViews; ++view) tell(fiber, View(view), to.views[view]);
    begin_epoch(fiber);
}

void acquire(const Fiber& fiber, const SharedClocks& from) {
    if (!machine.checked) return;
    SharedClock* known = threads[agent_of(fiber)].known;
    for (u32 view = 0; view < kNumViews; ++view) known[view] = joined(known[view], from.views[view]);
}

void meet_clocks(const std::vector<Fiber*>& fibers) {
    if (!machine.checked) return;
    Clocks all;
    for (const Fiber* fiber : fibers) release(*fiber, all);
    const SharedClocks shared = share(std::move(all));
    for (const Fiber* fiber : fibers) {
        for (u32 view = 0; view < kNumViews; ++view) threads[agent_of(*fiber)].known[view] = shared.views[view];
    }
}

void release_message(const Fiber& fiber, Message& to) {
    if (!machine.checked) return;
    tell(fiber, kGenericView, to.generic);
    tell(fiber, kNetworkView, to.network);
    begin_epoch(fiber);
}

static void learn(SharedClock& known, const Clock& from) {
    if (includes(*known, from)) return;
    auto both = std::make_shared<Clock>();
    both->epochs = known->epochs;
    both->join(from);
    known = both;
}

void acquire_message(const Fiber& fiber, const Message& from) {
    if (!machine.checked) return;
    SharedClock* known = threads[agent_of(fiber)].known;
    learn(known[kGenericView], from.generic);
    learn(known[kNetworkView], from.network);
}

// "A proxy fence is required to synchronize across different proxies": what this thread knows of the generic proxy, the
// async proxy now knows.
void fence_proxy(View view) {
    if (!machine.checked) return;
    Thread& self = threads[agent_of(*machine.current)];
    self.known[view] = joined(self.known[view], self.known[kGenericView]);
    self.own[view] = self.own[kGenericView];
    begin_epoch(*machine.current);
}

// What a check looks at: a view of a thread, or two.
struct Sight {
    u32 agent, own;
    const Clock& known;
    const Clock* more = nullptr;
    bool knows(u32 other, u32 epoch) const {
        return other == agent ? own >= epoch : known.knows(other, epoch) || (more && more->knows(other, epoch));
    }
};

static Sight sight_of(const Fiber& fiber, View view) {
    const u32 agent = agent_of(fiber);
    return {agent, threads[agent].own[view], *threads[agent].known[view]};
}

AsyncAgent new_agent(const char* kind) {
    agents.push_back({agent_of(*machine.current), kind, machine.block().grid});
    return {u32(agents.size() - 1), 1};
}

void release_async(const AsyncAgent& agent, bool is_generic, Clocks& to) {
    if (!machine.checked) return;
    to.views[kGenericView].know(agent.index, agent.epoch);
    if (is_generic) return;
    to.views[kAsyncSharedView].know(agent.index, agent.epoch);
    to.views[kAsyncGlobalView].know(agent.index, agent.epoch);
}

// What happened to a piece of memory: the last write, and what came after it.
struct Record {
    u32 agent = kNoAgent, epoch = 0;
    u32 at = 0, caller = 0;  // addresses of code
    Scope scope = kSys;      // of an atomic
};
struct Shadow {
    Record write;
    std::vector<Record> later[3];  // plain reads, atomic loads, atomic stores; each by agent
    std::vector<Record>& since(Access access) { return later[access == Access::kRead ? 0 : u32(access) - 1]; }
};
struct Piece {
    Shadow whole;
    std::vector<Piece> parts;  // four instead, once a part was accessed by itself
};
constexpr u32 kPieceBytes = 16;
struct Range {
    const u8* begin;
    u64 num_bytes;
    std::vector<Piece> pieces;
};
static std::vector<Range> ranges;  // of the blocks, then of the writable arrays

static void make_ranges() {
    for (const Block& block : machine.blocks) ranges.push_back({block.shared, machine.shared_bytes, {}});
    for (const Region& region : machine.regions) {
        if (region.writable || region.is_late) ranges.push_back({region.begin, region.num_bytes, {}});
    }
    for (Range& range : ranges) range.pieces.resize((range.num_bytes + kPieceBytes - 1) / kPieceBytes);
}

static Range* range_of(const u8* at, u32 num_bytes) {
    if (ranges.empty()) make_ranges();
    for (u32 i = 0; i < ranges.size(); ++i) {
        if (at < ranges[i].begin || at + num_bytes > ranges[i].begin + ranges[i].num_bytes) continue;
        if (i < machine.blocks.size() && machine.cluster_of(i) != machine.cluster_of(machine.current->block)) {
            fail("access to the shared memory of %s", block_name(i).c_str());
        }
        return &ranges[i];
    }
    for (const Region& region : machine.regions) {
        if (at < region.begin && at >= region.begin - region.lead) {
            fail("access %lld bytes before %s", i64(region.begin - at), region.name.c_str());
        }
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
    if (agent.fiber == kNoFiber)
        return "  " + std::string(verb) + "write of late contents, as what came before ended\n";
    const Fiber& fiber = machine.fibers[agent.fiber];
    char text[300];
    std::snprintf(text, sizeof text, "  %s%s by %s%s%s, lane %u, at <%x %x>\n", verb, name_of(access), agent.kind,
                  *agent.kind ? " of " : "", place_name(fiber).c_str(), fiber.lane(), record.at, record.caller);
    return text;
}

static bool reads_garbage(const Record& record, Access access) {
    return access == Access::kRead && agents[record.agent].kind == kBulkCopy;
}

// The least scope that spans both blocks.
static Scope scope_of(u32 block, u32 other_block) {
    if (block == other_block) return kCta;
    return machine.grid_of(block).stream == machine.grid_of(other_block).stream ? kGpu : kSys;
}

static Scope narrower(Scope a, Scope b) { return a < b ? a : b; }

static const char* name_of(Scope scope) {
    static const char* const kNames[] = {"cta", "gpu", "sys"};
    return kNames[scope];
}

// A tensor copy may bring in rows that others are writing, if nobody uses them: such bytes become garbage instead, and
// the result tells whether they were used.
static std::string first_garbage;
static u64 num_garbage;

static bool is_atomic(Access access) { return access == Access::kAtomicLoad || access == Access::kAtomicStore; }

// Reports a race and ends, or returns: the read brings garbage.
static void report(const void* pointer, const Record& now, Access access, const Record& before, Access access_before,
                   bool lacks_fence) {
    std::string why = "no release and acquire, barrier or completion orders them";
    if (lacks_fence) why = "ordered in the generic proxy only: a fence.proxy.async is missing";
    if (is_atomic(access) && is_atomic(access_before)) {
        why = std::string("not atomic to each other: at ") + name_of(now.scope) + " and " + name_of(before.scope) +
              " scope";
    }
    const std::string text = address_name(pointer) + "\n" + describe("", now, access) +
                             describe("earlier ", before, access_before) + "  " + why + "\n";
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

// An access as the checks see it. It must know of the writes before it in `writes`, and if it writes itself of the
// reads before it in `reads`.
struct Checked {
    Record now;
    Access access;
    Sight reads, writes;
    bool is_ordered = true;  // so far; false: it brings garbage
};

static void check(Checked& c, const u8* at, const Record& before, Access access_before) {
    const Sight& known = access_before == Access::kRead || access_before == Access::kAtomicLoad ? c.reads : c.writes;
    if (before.agent == kNoAgent || known.knows(before.agent, before.epoch)) return;
    c.is_ordered = false;
    report(at, c.now, c.access, before, access_before, c.reads.knows(before.agent, before.epoch));
}

// Two atomics do not race if each is of a scope that spans both.
static bool are_atomic(const Checked& c, const Record& before, Access access_before) {
    if (!is_atomic(c.access) || !is_atomic(access_before)) return false;
    const u32 fiber = agents[c.now.agent].fiber, other = agents[before.agent].fiber;
    if (fiber == kNoFiber || other == kNoFiber) return true;
    return narrower(c.now.scope, before.scope) >= scope_of(machine.fibers[fiber].block, machine.fibers[other].block);
}

static void access_shadow(Checked& c, const u8* at, Shadow& shadow) {
    const auto check_all = [&](Access before) {
        for (const Record& record : shadow.since(before)) {
            if (!are_atomic(c, record, before)) check(c, at, record, before);
        }
    };
    const bool stores = c.access == Access::kWrite || c.access == Access::kAtomicStore;
    check(c, at, shadow.write, Access::kWrite);
    if (stores) {
        check_all(Access::kRead);
        check_all(Access::kAtomicLoad);
    }
    check_all(Access::kAtomicStore);
    if (c.access == Access::kWrite) {
        shadow = Shadow{c.now, {}};
        return;
    }
    std::vector<Record>& records = shadow.since(c.access);
    const auto by_agent = [](const Record& record, u32 agent) { return record.agent < agent; };
    const auto place = std::lower_bound(records.begin(), records.end(), c.now.agent, by_agent);
    if (place != records.end() && place->agent == c.now.agent) {
        *place = c.now;
    } else {
        records.insert(place, c.now);
    }
}

// Bytes `first` .. `first + num` of a piece of `size` bytes at `at`.
static void access_piece(Checked& c, const u8* at, Piece& piece, u32 size, u32 first, u32 num) {
    const bool is_whole = num == size;
    if (piece.parts.empty()) {
        if (is_whole) return access_shadow(c, at, piece.whole);
        piece.parts.assign(4, piece);
    }
    const u32 part = size / 4;
    for (u32 begin = 0; begin < size; begin += part) {
        const u32 from = first > begin ? first : begin, to = first + num < begin + part ? first + num : begin + part;
        if (from < to) access_piece(c, at + begin, piece.parts[begin / part], part, from - begin, to - from);
    }
    if (is_whole && c.access == Access::kWrite) piece = Piece{{c.now, {}}, {}};
}

static bool access_bytes(const void* pointer, u32 num_bytes, Checked c) {
    const u8* at = static_cast<const u8*>(pointer);
    Range* range = range_of(at, num_bytes);
    if (range == nullptr) return true;
    for (u64 offset = at - range->begin, end = offset + num_bytes; offset < end;) {
        const u32 first = u32(offset % kPieceBytes), left = u32(end - offset);
        const u32 num = left < kPieceBytes - first ? left : kPieceBytes - first;
        access_piece(c, range->begin + offset - first, range->pieces[offset / kPieceBytes], kPieceBytes, first, num);
        offset += num;
    }
    return c.is_ordered;
}

// In the executable's file, which the system loads anywhere.
static u32 code_address(const void* address) { return u32(static_cast<const char*>(address) - &__executable_start); }

static u32 caller_of(const Fiber& fiber) {
    return fiber.num_calls ? fiber.calls[(fiber.num_calls - 1) % kMaxCalls] : 0;
}

void check_access(const void* pointer, u32 num_bytes, Access access, const void* at) {
    if (machine.current) check_access(pointer, num_bytes, access, at, *machine.current);
}

void check_access(const void* pointer, u32 num_bytes, Access access, const void* at, const Fiber& fiber, Scope scope) {
    if (!machine.checked) return;
    const Sight known = sight_of(fiber, kGenericView);
    const Record now{known.agent, known.own, code_address(at), caller_of(fiber), scope};
    access_bytes(pointer, num_bytes, {now, access, known, known});
}

// Asynchronous work is checked when it is issued, with what its thread knows then: it may happen from now on.
bool check_async_access(const AsyncAgent& agent, const void* pointer, u32 num_bytes, Access access, View view,
                        const void* at) {
    if (!machine.checked) return true;
    const Record now{agent.index, agent.epoch, code_address(at), caller_of(*machine.current)};
    const Sight reads = sight_of(*machine.current, kGenericView), writes = sight_of(*machine.current, view);
    return access_bytes(pointer, num_bytes, {now, access, reads, writes});
}

// The network card writes to a peer's memory. The card is no proxy of the peer's: it needs to know that accesses there
// are over, and no more.
void check_put(const AsyncAgent& writer, const void* target, u32 num_bytes, Access access, const void* at) {
    if (!machine.checked) return;
    const Record now{writer.index, writer.epoch, code_address(at), caller_of(*machine.current)};
    Sight sight = sight_of(*machine.current, kGenericView);
    sight.more = threads[sight.agent].known[kNetworkView].get();
    access_bytes(target, num_bytes, {now, access, sight, sight});
}

// What a signal takes along, as of now: that the puts of `writer` have landed; and for puts that answer it, that what
// the running thread knows of is over. Who acquires it sees nothing else that this thread or others wrote.
void release_put(const AsyncAgent& writer, Message& to) {
    if (!machine.checked) return;
    const Fiber& self = *machine.current;
    to.generic.know(writer.index, writer.epoch);
    tell(self, kGenericView, to.network);
    to.network.join(*threads[agent_of(self)].known[kNetworkView]);
    begin_epoch(self);
}

// The end of a stream's launches puts all that they did, in any proxy, before what comes after in that stream. Late
// contents are written at that moment, with atomic stores: who has not waited may look with an atomic load, and sees
// old words or new ones. Puts may land later still.
SharedClocks end_launches_before(const Grid& grid) {
    if (!machine.checked) return {};
    constexpr u32 kOver = ~0u;  // as an epoch: all of them
    const u32 writer = u32(agents.size());
    agents.push_back({kNoFiber, "", u32(&grid - machine.grids.data())});
    Clocks all;
    for (u32 agent = 0; agent < agents.size(); ++agent) {
        const auto& [fiber, kind, number] = agents[agent];
        const Grid& its = machine.grids[number];
        const bool is_over = its.launch < grid.launch || (its.launch == grid.launch && fiber == kNoFiber);
        if (its.stream != grid.stream || !is_over || kind == kPut) continue;
        for (u32 view = 0; view < kNumViews; ++view) {
            if (agent < threads.size()) all.views[view].join(threads[agent].known[view]);
            all.views[view].know(agent, kOver);
        }
    }
    const SharedClocks known = share(std::move(all));
    const Sight sight{writer, kOver, *known.views[kGenericView]};
    for (const Late& late : grid.late) {
        const Region& region = machine.regions[late.region];
        access_bytes(region.begin, u32(region.num_bytes), {{writer, 1}, Access::kAtomicStore, sight, sight});
    }
    return known;
}

// Words that order memory. "A release pattern at a location is observed by an acquire pattern there, if their scopes
// include each other"; read-modify-writes continue the release sequence, a relaxed store ends it. A fence makes a
// release pattern of the relaxed stores behind it, and an acquire pattern of the relaxed loads before it. What another
// block's async proxy knows does not travel: "when synchronizing threads are in different CTAs, the proxy fence must be
// in the CTA of the non-generic operation" (Lustig et al., Mixed-proxy extensions for the PTX memory model, ISCA 2022).
using SyncWord = std::map<std::pair<u32, Scope>, Message>;  // what was released, by block and scope
static std::unordered_map<const void*, SyncWord> sync_words;

void check_word(const void* word, u32 num_bytes, bool loads, bool stores, Order order, Scope scope, const void* at) {
    if (!machine.checked) return;
    check_access(word, num_bytes, stores ? Access::kAtomicStore : Access::kAtomicLoad, at, *machine.current, scope);
    const Fiber& self = *machine.current;
    Thread& thread = threads[agent_of(self)];
    SyncWord& sync = sync_words[word];
    for (const auto& [from, message] : sync) {
        if (!loads) break;
        const Scope both = narrower(scope, from.second), least = scope_of(self.block, from.first);
        if (both < least) continue;
        if (order == kAcquire || order == kAcqRel) {
            acquire_message(self, message);
        } else if (!includes(*thread.known[kGenericView], message.generic) ||
                   !includes(*thread.known[kNetworkView], message.network)) {
            thread.seen[least].join(message);
        }
    }
    if (stores && !loads) sync.clear();
    if (stores) {
        for (const auto& [fenced, message] : thread.fenced) sync[{self.block, narrower(fenced, scope)}].join(message);
    }
    if (order == kRelease || order == kAcqRel) release_message(self, sync[{self.block, scope}]);
}

// The network card adds to the word, and releases at system scope.
void land_message(const void* word, u32 from_block, const Message& message) {
    if (machine.checked) sync_words[word][{from_block, kSys}].join(message);
}

void check_fence(Scope scope) {
    if (!machine.checked) return;
    const Fiber& self = *machine.current;
    Thread& thread = threads[agent_of(self)];
    for (const auto& [least, message] : thread.seen) {
        if (scope >= least) acquire_message(self, message);
    }
    release_message(self, thread.fenced[scope]);
}

}  // namespace emu

// What the compiler's ThreadSanitizer pass calls.
extern "C" {

#define EMU_ACCESS(name, num_bytes, access) \
    void name(void* pointer) { emu::check_access(pointer, num_bytes, access, __builtin_return_address(0)); }
#define EMU_ACCESSES(num_bytes)                                                 \
    EMU_ACCESS(__tsan_read##num_bytes, num_bytes, emu::Access::kRead)           \
    EMU_ACCESS(__tsan_write##num_bytes, num_bytes, emu::Access::kWrite)         \
    EMU_ACCESS(__tsan_unaligned_read##num_bytes, num_bytes, emu::Access::kRead) \
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

// Clang's, for copies of structs.
void* __tsan_memcpy(void* to, const void* from, unsigned long num_bytes) {
    emu::check_access(from, emu::u32(num_bytes), emu::Access::kRead, __builtin_return_address(0));
    emu::check_access(to, emu::u32(num_bytes), emu::Access::kWrite, __builtin_return_address(0));
    return std::memmove(to, from, num_bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long num_bytes) { return __tsan_memcpy(to, from, num_bytes); }
void* __tsan_memset(void* to, int value, unsigned long num_bytes) {
    emu::check_access(to, emu::u32(num_bytes), emu::Access::kWrite, __builtin_return_address(0));
    return std::memset(to, value, num_bytes);
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
