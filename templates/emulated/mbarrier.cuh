// Shared-memory barriers with phases and transaction counts (PTX ISA, mbarrier). Relies on memory.cuh, check.cuh.

DEVICE void init_barrier(u64* barrier, u32 arrivals) { emu::init_barrier(barrier, arrivals); }

DEVICE void fence_barrier_init() { emu::fence_barrier_init(); }

DEVICE void arrive(u64* barrier) { emu::arrive(barrier, 0); }

DEVICE void arrive_expect_bytes(u64* barrier, u32 bytes) { emu::arrive(barrier, bytes); }

// One arrival, made when all earlier copy_*_async of this thread have landed. Counts among the barrier's arrivals.
DEVICE void arrive_after_copies(u64* barrier) { emu::arrive_after_copies(barrier); }

DEVICE bool try_wait(u64* barrier, u32 parity) { return emu::try_wait(barrier, parity); }

DEVICE bool test_wait(u64* barrier, u32 parity) { return emu::test_wait(barrier, parity); }

DEVICE void wait_barrier(const Params& p, Wait what, u64* barrier, u32 index, u32 parity) {
    const auto poll = [&] { return try_wait(barrier, parity); };
    if (!(kTrace ? test_wait(barrier, parity) : poll())) poll_until(p, what, index, parity, poll);
}

DEVICE void wait_in_flight(const Params& p, u64* barrier, u32 index, u32 parity) {
    const bool is_event = kTrace && !test_wait(barrier, parity);
    if (is_event) trace_begin(p, kEventWait + kWaitStageFull, index, parity);
    u32 start = 0;
    while (!try_wait(barrier, parity)) {
        const u32 now = global_timer_us();
        start = start == 0 ? now : start;
        if (now - start <= p.timeout_us) continue;
        report_timeout(p, kWaitStageFull, index, parity);
        break;
    }
    if (is_event) trace_end(p, kEventWait + kWaitStageFull);
}
