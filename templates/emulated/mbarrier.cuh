// Shared-memory barriers with phases and transaction counts (PTX ISA, mbarrier). Relies on memory.cuh.

DEVICE void init_barrier(u64* barrier, u32 arrivals) { emu::init_barrier(barrier, arrivals); }

DEVICE void fence_barrier_init() { emu::fence_barrier_init(); }

DEVICE void arrive(u64* barrier) { emu::arrive(barrier, 0); }

DEVICE void arrive_expect_bytes(u64* barrier, u32 bytes) { emu::arrive(barrier, bytes); }

// One arrival, made when all earlier copy_*_async of this thread have landed. Counts among the barrier's arrivals.
DEVICE void arrive_after_copies(u64* barrier) { emu::arrive_after_copies(barrier); }

DEVICE bool try_wait(u64* barrier, u32 parity) { return emu::try_wait(barrier, parity); }

DEVICE bool test_wait(u64* barrier, u32 parity) { return emu::test_wait(barrier, parity); }
