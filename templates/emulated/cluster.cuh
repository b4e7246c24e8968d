// Clusters of CTAs: each other's shared memory, and copies into several at once (PTX ISA, mapa, barrier.cluster,
// multicast::cluster). Relies on mbarrier.cuh, tma.cuh.

DEVICE u32 cluster_rank() { return emu::cluster_rank(); }

template <typename T>
DEVICE T* map_shared(T* own, u32 rank) {
    return static_cast<T*>(emu::map_shared(own, rank));
}

DEVICE void sync_cluster() { emu::sync_cluster(); }

DEVICE void arrive_cluster(u64* own, u32 rank) { emu::arrive_cluster(own, rank); }

DEVICE bool try_wait_cluster(u64* barrier, u32 parity) { return emu::try_wait_cluster(barrier, parity); }

DEVICE void load_tile_2d_multicast(void* tile, const TensorMap* map, u64* full, i32 c0, i32 c1, u32 ranks) {
    const i32 coords[] = {c0, c1};
    emu::load_tile_multicast(tile, map, full, 2, coords, ranks);
}
