// Waits with a budget. On expiry the first thread to give up records who waited for what in the status words, and
// every thread that still waits leaves: no trap, the context survives. Relies on memory.cuh, Params and stamps.cuh.

// What can be awaited; run/workspace.py holds the sentences.
enum Wait : u32 {
    kWaitStageFull = 1,
    kWaitStageEmpty = 2,
    kWaitTaskFull = 3,
    kWaitTaskEmpty = 4,
    kWaitGridBarrier = 5,
    kWaitHead = 6,
    kWaitMid = 7,
    kWaitTileStored = 8,
    kWaitListFull = 9,
    kWaitPreloaded = 10,
    kWaitTaskWanted = 11,
    kWaitLanded = 12,
    kWaitTaken = 13,
    kWaitSummed = 14,
    kWaitPairs = 15,
    kWaitTokens = 16,
    kWaitExpert = 17,
    kWaitBound = 18,
    kWaitCounts = 19,
    kWaitRows = 20,
    kWaitSumsWanted = 21,
    kWaitSums = 22,
    kWaitRail = 23,
    kWaitMessages = 24,
    kWaitMates = 25,
    kWaitHome = 26,
    kWaitFlush = 27,
};

// Words of Params::header.
constexpr u32 kHeaderParity = 0;
constexpr u32 kHeaderAbort = 32;

DEVICE void report_timeout(const Params& p, Wait what, u32 index, u32 expected) {
    if (compare_and_swap_gpu(p.header + kHeaderAbort, 0, 1) == 0) {
        store_relaxed_sys(p.status + 1, what);
        store_relaxed_sys(p.status + 2, block_idx());
        store_relaxed_sys(p.status + 3, thread_idx() / kWarpThreads);
        store_relaxed_sys(p.status + 4, index);
        store_relaxed_sys(p.status + 5, expected);
        store_release_sys(p.status, 1);
    }
}

// Polls until `poll()` is true; false if the budget is spent. `index`, which polls may change, and `expected` go to the
// message. With kTogether a whole warp, whose lanes all get the same of `poll()`, gives up as one.
template <bool kTogether = false, typename Poll>
DEVICE bool poll_in_time(const Params& p, Wait what, const u32& index, u32 expected, Poll poll) {
    const u32 begin = trace_time();
    const u32 start = global_timer_us();
    for (u32 polls = 1; !poll(); ++polls) {
        if (polls % 128 != 0) continue;
        const bool expired = global_timer_us() - start > p.timeout_us;
        const bool gives_up = expired || load_relaxed_gpu(p.header + kHeaderAbort) != 0;
        if (kTogether ? __ballot_sync(kFullMask, gives_up) == 0 : !gives_up) continue;
        report_timeout(p, what, index, expected);
        return false;
    }
    trace_whole(p, begin, kEventWait + what, index);
    return true;
}

template <bool kTogether = false, typename Poll>
DEVICE void poll_until(const Params& p, Wait what, const u32& index, u32 expected, Poll poll) {
    if (!poll_in_time<kTogether>(p, what, index, expected, poll)) exit_thread();
}

// The same after a first look, which mostly is enough.
template <bool kTogether = false, typename Poll>
DEVICE void wait_until(const Params& p, Wait what, const u32& index, u32 expected, Poll poll) {
    if (!poll()) poll_until<kTogether>(p, what, index, expected, poll);
}
