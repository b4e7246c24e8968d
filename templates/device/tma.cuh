// Tensor and bulk copies, global to shared memory, that complete on an mbarrier (PTX ISA, cp.async.bulk.tensor), and
// bulk copies back, that complete in groups. Rows and columns out of bounds are filled with zeros and count as bytes.
// Relies on memory.cuh.

// Which lines the L2 cache gives up first (PTX ISA, createpolicy).
DEVICE u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE u64 evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// `bytes` contiguous bytes, a multiple of 16 at addresses that are.
DEVICE void load_bulk(void* shared, const void* global, u32 bytes, u64* full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

// `bytes` contiguous bytes to global memory, a peer's too; a multiple of 16 at addresses that are. Generic-proxy writes
// to `shared` take a fence_async_shared first, to `global` a fence_async_global. A block must not end before `shared`
// was read.
DEVICE void store_bulk(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

// Bulk stores of this thread since the last commit are a group, of another kind than commit_copies has.
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the newest kNewest groups of this thread have read their shared memory, which may be written again.
template <u32 kNewest>
DEVICE void wait_for_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}

// Until they are complete: their writes are visible to this thread, and to others by a release that follows.
template <u32 kNewest>
DEVICE void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}

DEVICE void load_tile_2d(void* tile, const TensorMap* map, u64* full, i32 c0, i32 c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(tile)),
        "l"(map), "r"(shared_address(full)), "r"(c0), "r"(c1)
        : "memory");
}

DEVICE void load_tile_3d(void* tile, const TensorMap* map, u64* full, u64 policy, i32 c0, i32 c1, i32 c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(tile)),
        "l"(map), "r"(shared_address(full)), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
        : "memory");
}

DEVICE void load_tile_5d(void* tile, const TensorMap* map, u64* full, u64 policy, i32 c0, i32 c1, i32 c2, i32 c3,
                         i32 c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(tile)),
        "l"(map), "r"(shared_address(full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
        : "memory");
}
