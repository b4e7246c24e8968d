// Tensor and bulk copies, global to shared memory, that complete on an mbarrier (PTX ISA, cp.async.bulk.tensor). Rows
// and columns out of bounds are filled with zeros and count as bytes. Relies on memory.cuh.

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
