// Tensor and bulk copies, global to shared memory, that complete on an mbarrier (PTX ISA, cp.async.bulk.tensor), and
// bulk copies back, that complete in groups. Rows and columns out of bounds are filled with zeros and count as bytes.
// Relies on memory.cuh.

// No cache is emulated.
DEVICE u64 evict_first() { return 0; }
DEVICE u64 evict_normal() { return 0; }

DEVICE void prefetch_tensor_map(const TensorMap*) {}

// `bytes` contiguous bytes, a multiple of 16 at addresses that are.
DEVICE void load_bulk(void* shared, const void* global, u32 bytes, u64* full) {
    emu::load_bulk(shared, global, bytes, full);
}

// `bytes` contiguous bytes to global memory, a peer's too; a multiple of 16 at addresses that are. Generic-proxy writes
// to `shared` take a fence_async_shared first, to `global` a fence_async_global. A block must not end before `shared`
// was read.
DEVICE void store_bulk(void* global, const void* shared, u32 bytes) { emu::store_bulk(global, shared, bytes); }

// Bulk stores of this thread since the last commit are a group, of another kind than commit_copies has.
DEVICE void commit_stores() { emu::commit_stores(); }

// Until all but the newest kNewest groups of this thread have read their shared memory, which may be written again.
template <u32 kNewest>
DEVICE void wait_for_stores_read() {
    emu::wait_for_stores_read(kNewest);
}

// Until they are complete: their writes are visible to this thread, and to others by a release that follows.
template <u32 kNewest>
DEVICE void wait_for_stores() {
    emu::wait_for_stores(kNewest);
}

DEVICE void load_tile_2d(void* tile, const TensorMap* map, u64* full, i32 c0, i32 c1) {
    const i32 coords[] = {c0, c1};
    emu::load_tile(tile, map, full, 2, coords);
}

DEVICE void load_tile_3d(void* tile, const TensorMap* map, u64* full, u64, i32 c0, i32 c1, i32 c2) {
    const i32 coords[] = {c0, c1, c2};
    emu::load_tile(tile, map, full, 3, coords);
}

DEVICE void load_tile_5d(void* tile, const TensorMap* map, u64* full, u64, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    const i32 coords[] = {c0, c1, c2, c3, c4};
    emu::load_tile(tile, map, full, 5, coords);
}
