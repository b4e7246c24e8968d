// Waits at shared-memory barriers, with a budget. Relies on mbarrier.cuh, check.cuh and stamps.cuh.

DEVICE void wait_barrier(const Params& p, Wait what, u64* barrier, u32 index, u32 parity) {
    const auto poll = [&] { return try_wait(barrier, parity); };
    if (!(kTrace ? test_wait(barrier, parity) : poll())) poll_until(p, what, index, parity, poll);
}

// The same while WGMMAs are in flight. No path out of the kernel here: ptxas would serialise them (C7518). When the
// budget is spent it reports and returns; the next wait elsewhere leaves. The clock is read after a look in vain only,
// and without a branch: the loop around has no register left.
DEVICE void wait_in_flight(const Params& p, u64* barrier, u32 index, u32 parity) {
    const bool is_event = kTrace && !test_wait(barrier, parity);
    const u32 begin = is_event ? trace_time() : 0;
    u32 start = 0;
    while (!try_wait(barrier, parity)) {
        const u32 now = global_timer_us();
        start = start == 0 ? now : start;
        if (now - start <= p.timeout_us) continue;
        report_timeout(p, kWaitStageFull, index, parity);
        break;
    }
    if (is_event) trace_whole(p, begin, kEventWait + kWaitStageFull, index);
}
