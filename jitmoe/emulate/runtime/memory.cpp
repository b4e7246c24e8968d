// Shared memory windows, loads, stores and atomics with their waiting, and cp.async.
#include "machine.h"

namespace emu {

static const SharedRegion* find_shared_region(u32 offset) {
    for (const SharedRegion& region : machine.shared_regions) {
        if (offset >= region.offset && offset < region.offset + region.num_bytes) return &region;
    }
    return nullptr;
}

// "full[2]" for an address in shared memory.
std::string shared_name(u32 address) {
    const u32 offset = address - kSharedBase;
    const SharedRegion* region = find_shared_region(offset);
    if (region == nullptr) return "shared memory + " + std::to_string(offset);
    const u32 bytes = region->num_bytes / region->count, rest = (offset - region->offset) % bytes;
    std::string name = region->name + "[" + std::to_string((offset - region->offset) / bytes) + "]";
    return rest ? name + " + " + std::to_string(rest) : name;
}

static const Region* find_region(const void* pointer) {
    for (const Region& region : machine.regions) {
        if (pointer >= region.begin && pointer < region.begin + region.num_bytes) return &region;
    }
    return nullptr;
}

static bool is_shared(const void* pointer, u32 block) {
    const u8* shared = machine.blocks[block].shared;
    return pointer >= shared && pointer < shared + machine.shared_bytes;
}

std::string address_name(const void* pointer) {
    if (machine.current && is_shared(pointer, machine.current->block)) {
        const u8* shared = machine.blocks[machine.current->block].shared;
        return shared_name(kSharedBase + u32(static_cast<const u8*>(pointer) - shared));
    }
    char text[200];
    if (const Region* region = find_region(pointer)) {
        const u64 offset = static_cast<const u8*>(pointer) - region->begin;
        std::snprintf(text, sizeof text, "%s + %llu bytes", region->name.c_str(), offset);
        return text;
    }
    std::snprintf(text, sizeof text, "address %p", pointer);
    for (const Region& region : machine.regions) {  // each has a guard page on either side
        const i64 offset = static_cast<const u8*>(pointer) - region.begin;
        if (offset < -4096 || offset >= i64(region.num_bytes) + 4096) continue;
        std::snprintf(text, sizeof text, "byte %lld of %s, which has %llu", offset, region.name.c_str(),
                      region.num_bytes);
    }
    return text;
}

void* dynamic_shared_memory() { return machine.block().shared; }

u32 shared_address(const void* pointer) {
    const i64 offset = static_cast<const u8*>(pointer) - machine.block().shared;
    return u32(offset) + kSharedBase;  // bounds are checked where the address is used
}

void check_shared(const void* pointer, u32 num_bytes, u32 alignment, const char* what) {
    const u8* begin = machine.block().shared;
    const u8* at = static_cast<const u8*>(pointer);
    if (at < begin || at + num_bytes > begin + machine.shared_bytes) {
        fail("%s of %u bytes at %s: not in the block's shared memory", what, num_bytes, address_name(pointer).c_str());
    }
    if (u64(at) % alignment != 0) {
        fail("%s at %s: not a multiple of %u", what, address_name(pointer).c_str(), alignment);
    }
}

void check_global(const void* pointer, u32 num_bytes, u32 alignment, bool write, const char* what) {
    const Region* region = find_region(pointer);
    if (region == nullptr || static_cast<const u8*>(pointer) + num_bytes > region->begin + region->num_bytes) {
        fail("%s of %u bytes at %s: out of bounds", what, num_bytes, address_name(pointer).c_str());
    }
    if (write && !region->writable) fail("%s to the input %s", what, region->name.c_str());
    if (u64(pointer) % alignment != 0) {
        fail("%s at %s: not a multiple of %u", what, address_name(pointer).c_str(), alignment);
    }
}

// Threads that poll a flag sleep until it is written: a poll that sees what the thread's last operation saw already
// tells it nothing. A poll of try_wait sleeps by itself (mbarrier.cpp).

static std::unordered_map<const void*, std::vector<Fiber*>> pollers;

bool any_pollers() {
    for (const Fiber& fiber : machine.fibers) {
        const auto kind = fiber.waiting.kind;
        if (fiber.state == Fiber::kBlocked && (kind == Waiting::kFlag || kind == Waiting::kMbarrier)) return true;
    }
    return false;
}

void wake_pollers(bool all, const void* address) {
    if (all) {
        pollers.clear();
        for (Fiber& fiber : machine.fibers) {
            const auto kind = fiber.waiting.kind;
            if (kind == Waiting::kFlag || kind == Waiting::kMbarrier) wake(&fiber);
        }
        return;
    }
    machine.progress += 1;
    const auto found = pollers.find(address);
    if (found == pollers.end()) return;
    const std::vector<Fiber*> sleeping = std::move(found->second);
    pollers.erase(found);
    for (Fiber* fiber : sleeping) wake(fiber);
}

#define HERE __builtin_return_address(0)

static void check_bounds(const void* address, u32 num_bytes, bool write) {
    if (is_shared(address, machine.current->block)) {
        check_shared(address, num_bytes, num_bytes, write ? "atomic" : "load");
    } else {
        check_global(address, num_bytes, num_bytes, write, write ? "store or atomic" : "load");
    }
}

template <typename Word>
static Word load_word(const Word* address, Order order, Scope scope, const void* at) {
    Fiber* self = machine.current;
    check_bounds(address, sizeof(Word), false);
    const bool again = self->polled == address;
    maybe_switch();
    if (again && *address == self->polled_value && !machine.expired) {
        pollers[address].push_back(self);
        block_on({Waiting::kFlag, address, sizeof(Word), 0, ""});
    }
    self->polled = self->last_loaded = address;
    self->last_bytes = sizeof(Word);
    check_word(address, sizeof(Word), true, false, order, scope, at);
    self->polled_value = *address;
    return *address;
}

template <typename Word>
static void store_word(Word* address, Word value, Order order, Scope scope, const void* at) {
    maybe_switch();
    check_bounds(address, sizeof(Word), true);
    check_word(address, sizeof(Word), false, true, order, scope, at);
    *address = value;
    wake_pollers(false, address);
}

// Read, modify, write; returns what was there.
template <typename Word, typename Modify>
static Word change_word(Word* address, Order order, Scope scope, const void* at, Modify modify) {
    maybe_switch();
    check_bounds(address, sizeof(Word), true);
    check_word(address, sizeof(Word), true, true, order, scope, at);
    const Word old = *address;
    *address = modify(old);
    wake_pollers(false, address);
    return old;
}

u32 load(const u32* address, Order order, Scope scope) { return load_word(address, order, scope, HERE); }
u64 load(const u64* address, Order order, Scope scope) { return load_word(address, order, scope, HERE); }

void store(u32* address, u32 value, Order order, Scope scope) { store_word(address, value, order, scope, HERE); }
void store(u64* address, u64 value, Order order, Scope scope) { store_word(address, value, order, scope, HERE); }

u32 fetch_add(u32* address, u32 value, Order order, Scope scope) {
    return change_word(address, order, scope, HERE, [=](u32 old) { return old + value; });
}

u64 fetch_add(u64* address, u64 value, Order order, Scope scope) {
    return change_word(address, order, scope, HERE, [=](u64 old) { return old + value; });
}

u32 fetch_or(u32* address, u32 bits, Order order, Scope scope) {
    return change_word(address, order, scope, HERE, [=](u32 old) { return old | bits; });
}

u32 compare_and_swap(u32* address, u32 expected, u32 desired, Order order, Scope scope) {
    return change_word(address, order, scope, HERE, [=](u32 old) { return old == expected ? desired : old; });
}

void fence(Scope scope) {
    maybe_switch();
    check_fence(scope);
}

void fence_async_shared() {
    maybe_switch();
    fence_proxy(kAsyncSharedView);
}

void fence_async_global() {
    maybe_switch();
    fence_proxy(kAsyncGlobalView);
}

// cp.async: "the copy is asynchronous and its writes are seen by whoever waits for its completion". Each copy lands at
// once or, as late as may be, when its completion is announced; until then its bytes are poison.

static void land(AsyncCopy& copy) {
    if (!copy.landed) std::memcpy(copy.shared, copy.global, copy.num_bytes);
    copy.landed = true;
}

// The copies of the thread before number `end`.
void land_copies(Fiber& fiber, u64 end) {
    for (; fiber.first_copy < end; ++fiber.first_copy) {
        land(fiber.copies.front());
        fiber.copies.pop_front();
    }
}

void copy_async(void* shared, const void* global, u32 num_bytes) {
    maybe_switch();
    check_shared(shared, num_bytes, num_bytes, "cp.async");
    check_global(global, num_bytes, num_bytes, false, "cp.async");
    AsyncAgent& agent = machine.current->copy_agent;
    if (agent.epoch == 0) agent = new_agent("cp.async");
    check_async_access(agent, global, num_bytes, Access::kRead, kGenericView, HERE);
    check_async_access(agent, shared, num_bytes, Access::kWrite, kGenericView, HERE);
    AsyncCopy copy{shared, global, num_bytes, false};
    std::memset(shared, 0xff, num_bytes);
    if (machine.random.below(100) >= machine.late_percent) land(copy);
    machine.current->copies.push_back(copy);
}

// cp.async.wait_all: "wait for all prior cp.async operations initiated by the executing thread"; no other thread knows.
void wait_for_copies() {
    maybe_switch();
    Fiber& self = *machine.current;
    land_copies(self, self.first_copy + self.copies.size());
    if (self.copy_agent.epoch == 0) return;
    Clocks landed;
    release_async(self.copy_agent, true, landed);
    acquire(self, share(std::move(landed)));
    self.copy_agent.epoch += 1;
}

// cp.async.commit_group: an epoch of the agent is a group.
void commit_copies() {
    maybe_switch();
    Fiber& self = *machine.current;
    self.copy_groups.push_back({self.first_copy + self.copies.size(), self.copy_agent});
    if (self.copy_agent.epoch != 0) self.copy_agent.epoch += 1;
}

// "cp.async.wait_group N: wait until N or fewer of the most recent groups are pending and all prior groups are
// complete."
void wait_for_copy_groups(u32 num_newest) {
    maybe_switch();
    Fiber& self = *machine.current;
    for (; self.copy_groups.size() > num_newest; self.copy_groups.pop_front()) {
        const CopyGroup& group = self.copy_groups.front();
        land_copies(self, group.end);
        if (group.agent.epoch == 0) continue;
        Clocks landed;
        release_async(group.agent, true, landed);
        acquire(self, share(std::move(landed)));
    }
}

}  // namespace emu
