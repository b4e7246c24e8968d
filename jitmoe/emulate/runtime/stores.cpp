// Bulk copies from shared to global memory, in groups of the thread that issues them: each reads its shared memory some
// time later, and writes another time later. Who waits for it may find that both happen only then.
#include "machine.h"

namespace emu {

#define HERE __builtin_return_address(0)

static void read_source(BulkStore& store) {
    if (store.is_read) return;
    store.bytes.assign(store.shared, store.shared + store.num_bytes);
    store.is_read = true;
}

static void write_target(BulkStore& store) {
    if (store.is_written) return;
    read_source(store);
    std::memcpy(store.global, store.bytes.data(), store.num_bytes);
    store.bytes = {};
    store.is_written = true;
    machine.progress += 1;
}

// cp.async.bulk: "sizes and addresses are multiples of 16". Reading and writing complete one without the other, so each
// has an agent; an epoch of theirs is a group.
void store_bulk(void* global, const void* shared, u32 num_bytes) {
    maybe_switch();
    if (num_bytes % 16 != 0) fail("a bulk store of %u bytes: not a multiple of 16", num_bytes);
    check_shared(shared, num_bytes, 16, "bulk store");
    check_global(global, num_bytes, 16, true, "bulk store");
    StoreGroup& group = machine.current->new_stores;
    if (group.reader.epoch == 0) {
        group.reader = new_agent("a bulk store");
        group.writer = new_agent("a bulk store");
    }
    check_async_access(group.reader, shared, num_bytes, Access::kRead, kAsyncSharedView, HERE);
    check_async_access(group.writer, global, num_bytes, Access::kWrite, kAsyncGlobalView, HERE);
    const BulkStore issued{static_cast<const u8*>(shared), static_cast<u8*>(global), num_bytes};
    const auto store = std::make_shared<BulkStore>(issued);
    group.stores.push_back(store);
    std::memset(global, 0xff, num_bytes);  // poison until the bytes land
    later(machine.max_delay, [=] {
        read_source(*store);
        later(machine.max_delay, [=] { write_target(*store); });
    });
}

// cp.async.bulk.commit_group: "if there are no uncommitted operations, an empty group".
void commit_stores() {
    maybe_switch();
    Fiber& self = *machine.current;
    StoreGroup& group = self.new_stores;
    self.store_groups.push_back(group);
    group.stores.clear();
    if (group.reader.epoch == 0) return;
    group.reader.epoch += 1;
    group.writer.epoch += 1;
}

static void know(Fiber& self, const AsyncAgent& agent) {
    if (agent.epoch == 0) return;
    Clocks done;
    release_async(agent, false, done);
    acquire(self, share(std::move(done)));
}

// "cp.async.bulk.wait_group.read N: wait until all operations in all but the N most recent groups have completed
// reading from their source locations."
void wait_for_stores_read(u32 num_newest) {
    maybe_switch();
    Fiber& self = *machine.current;
    for (; self.num_read_groups + num_newest < self.store_groups.size(); ++self.num_read_groups) {
        const StoreGroup& group = self.store_groups[self.num_read_groups];
        for (const auto& store : group.stores) read_source(*store);
        know(self, group.reader);
    }
}

// Without .read: until they have also written, and "the writes are made visible to the executing thread": to no other.
void wait_for_stores(u32 num_newest) {
    wait_for_stores_read(num_newest);
    Fiber& self = *machine.current;
    for (; self.store_groups.size() > num_newest; self.store_groups.pop_front()) {
        const StoreGroup& group = self.store_groups.front();
        for (const auto& store : group.stores) write_target(*store);
        know(self, group.writer);
        self.num_read_groups -= 1;
    }
}

// No other thread can wait for them, so nobody knows that the block outlives their reads.
bool may_read_shared(const Fiber& fiber) {
    bool may = !fiber.new_stores.stores.empty();
    for (u32 i = fiber.num_read_groups; i < fiber.store_groups.size(); ++i)
        may |= !fiber.store_groups[i].stores.empty();
    return may;
}

// At the end of a launch, which awaits writes that its threads did not wait for.
void land_stores(const Grid& grid) {
    Fiber* const fibers = &machine.fibers[grid.first_block * machine.num_threads];
    for (u32 i = 0; i < grid.num_blocks * machine.num_threads; ++i) {
        for (const StoreGroup& group : fibers[i].store_groups) {
            for (const auto& store : group.stores) write_target(*store);
        }
    }
}

}  // namespace emu
