// Thread block clusters: distributed shared memory, the cluster's barrier, arrivals at another block's mbarriers.
#include "machine.h"

namespace emu {

u32 cluster_rank() { return here.block % machine.cluster_size; }

u32 block_in_cluster(u32 rank) {
    if (rank >= machine.cluster_size) fail("block %u of a cluster of %u", rank, machine.cluster_size);
    const u32 block = machine.cluster_of(machine.current->block) * machine.cluster_size + rank;
    if (machine.blocks[block].num_live == 0) fail("shared memory of %s, which is over", block_name(block).c_str());
    return block;
}

// mapa: "the address in the shared memory of the target CTA that corresponds to the given one".
void* map_shared(const void* pointer, u32 rank) {
    check_shared(pointer, 1, 1, "mapa");
    return machine.blocks[block_in_cluster(rank)].shared + (shared_address(pointer) - kSharedBase);
}

// barrier.cluster: "wait causes the executing thread to wait for all non-exited threads of the cluster to arrive"; with
// .release and .acquire memory accesses before it are performed for the threads behind it.
static std::unordered_map<u32, std::vector<Fiber*>> waiting;  // by cluster

bool complete_cluster(u32 cluster) {
    std::vector<Fiber*>& there = waiting[cluster];
    u32 num_live = 0;
    for (u32 i = 0; i < machine.cluster_size; ++i)
        num_live += machine.blocks[cluster * machine.cluster_size + i].num_live;
    if (there.empty() || there.size() < num_live) return false;
    Message all;
    for (const Fiber* fiber : there) release_message(*fiber, all);
    for (const Fiber* fiber : there) acquire_message(*fiber, all);
    machine.progress += 1;
    for (Fiber* fiber : there) wake(fiber);
    there.clear();
    return true;
}

void sync_cluster() {
    maybe_switch();
    Fiber* self = machine.current;
    const u32 cluster = machine.cluster_of(self->block);
    waiting[cluster].push_back(self);
    if (complete_cluster(cluster)) {
        maybe_switch();
    } else {
        block_on({Waiting::kCluster, nullptr, cluster, 0, ""});
    }
}

u32 num_at_cluster_barrier(u32 cluster) { return u32(waiting[cluster].size()); }

}  // namespace emu
