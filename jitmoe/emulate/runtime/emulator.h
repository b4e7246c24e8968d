// What templates/emulated/ asks of the machine it runs on: the emulator's whole interface to kernel text. The compiler
// puts it before the text (-include), so that the text itself includes nothing.
#pragma once

namespace emu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// The running CUDA thread; the scheduler keeps it.
struct Place {
    u32 thread, block, num_blocks;
};
extern Place here;

[[noreturn]] void exit_thread();
u64 clock_ns();  // scheduler steps, a few nanoseconds each
u64 clock_steps();

// Memory. Addresses of shared memory are offsets in the window of the running thread's block, as on the device.
enum Order : u32 { kRelaxed, kAcquire, kRelease, kAcqRel };
enum Scope : u32 { kCta, kGpu, kSys };
void* dynamic_shared_memory();
u32 shared_address(const void* pointer);
u32 load(const u32* address, Order order, Scope scope);
void store(u32* address, u32 value, Order order, Scope scope);
u32 fetch_add(u32* address, u32 value, Order order, Scope scope);
u32 compare_and_swap(u32* address, u32 expected, u32 desired, Order order, Scope scope);
u32 fetch_or(u32* address, u32 bits, Order order, Scope scope);
u64 load(const u64* address, Order order, Scope scope);
void store(u64* address, u64 value, Order order, Scope scope);
u64 fetch_add(u64* address, u64 value, Order order, Scope scope);
void fence(Scope scope);
void fence_async_shared();
void fence_async_global();
void copy_async(void* shared, const void* global, u32 num_bytes);
void wait_for_copies();
void commit_copies();
void wait_for_copy_groups(u32 num_newest);

// mbarriers.
void init_barrier(u64* barrier, u32 arrivals);
void fence_barrier_init();
void arrive(u64* barrier, u32 expect_bytes);
void arrive_after_copies(u64* barrier);
bool try_wait(u64* barrier, u32 parity);
bool test_wait(u64* barrier, u32 parity);

// Bulk copies, and tensor copies through a map as jitmoe/emulate/run.py encodes it.
void load_bulk(void* shared, const void* global, u32 num_bytes, u64* full);
void load_tile(void* tile, const void* map, u64* full, u32 rank, const int* coords);
void store_bulk(void* global, const void* shared, u32 num_bytes);
void commit_stores();
void wait_for_stores_read(u32 num_newest);
void wait_for_stores(u32 num_newest);

// The network card, for one lane of a warp: puts and signals to the rail's rank on another node.
void put_rail(u32 own_node, u32 node, void* to, const void* from, u32 num_bytes);
void signal_rail(u32 own_node, u32 node, u64* word, u64 value);
void flush_rail();

// Clusters. A barrier is named by its place in the own block, `rank` says whose is meant.
u32 cluster_rank();
void* map_shared(const void* pointer, u32 rank);
void sync_cluster();
void arrive_cluster(u64* barrier, u32 rank);
bool try_wait_cluster(u64* barrier, u32 parity);
void load_tile_multicast(void* tile, const void* map, u64* full, u32 rank, const int* coords, u32 blocks);

// Launches of one stream.
void start_next_launch();
void wait_for_previous_launch();

// Warps, blocks, registers.
enum Shuffle : u32 { kIndex, kUp, kXor };
u32 shuffle(Shuffle kind, u32 mask, u32 value, u32 argument, u32 line);
u32 ballot(u32 mask, bool predicate, u32 line);
u32 make_uniform(u32 value);
void sync_warp(u32 mask);
void sync_block();
void sync_named(u32 id, u32 num_threads);
void set_registers(u32 launch_regs, u32 regs);
void store_matrices(void* row, const u32* matrices, u32 count, bool transposed);
void load_matrices(const void* row, u32* matrices, u32 count);

// Warpgroup matrix multiply, m64nNk32 e4m3: d has N / 2 registers of the running thread.
void wgmma_fence();
void wgmma(float* d, u32 n, bool accumulate, u64 a, u64 b);
void wgmma_bf16(float* d, u32 n, u64 a, u64 b);
void wgmma_registers(float* d, u32 n, bool accumulate, bool is_bf16, const u32* a, u64 b);
void wgmma_commit();
void wgmma_wait(u32 num_newest);

}  // namespace emu
