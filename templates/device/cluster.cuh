// Clusters of CTAs: each other's shared memory, and copies into several at once (PTX ISA, mapa, barrier.cluster,
// multicast::cluster). A room that pastes it is launched with clusters. Relies on mbarrier.cuh, tma.cuh.

DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// What lies at `own` here, in CTA `rank`; for loads and stores.
template <typename T>
DEVICE T* map_shared(T* own, u32 rank) {
    u64 address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(own), "r"(rank));
    return reinterpret_cast<T*>(address);
}

// All threads of all CTAs of the cluster. What came before it is seen behind it. The last thing a CTA does whose shared
// memory others use.
DEVICE void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// At the barrier of CTA `rank` that lies where `own` does here. Pairs with try_wait_cluster there.
DEVICE void arrive_cluster(u64* own, u32 rank) {
    asm volatile(
        "{"
        ".reg .b32 remote;"
        "mapa.shared::cluster.u32 remote, %0, %1;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];"
        "}" ::"r"(shared_address(own)),
        "r"(rank)
        : "memory");
}

// Of the own CTA, where other CTAs arrive too.
DEVICE bool try_wait_cluster(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{"
        ".reg .pred done;"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;"
        "selp.b32 %0, 1, 0, done;"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// To the same place in every CTA whose bit is set in `ranks`; completes on the barrier at the same place there.
DEVICE void load_tile_2d_multicast(void* tile, const TensorMap* map, u64* full, i32 c0, i32 c1, u32 ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(tile)),
        "l"(map), "r"(shared_address(full)), "r"(c0), "r"(c1), "h"(u16(ranks))
        : "memory");
}
