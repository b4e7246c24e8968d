// Until all CTAs here have sent their rows, or one has given up. No budget: who waits for others there has one, and
// knows whom to name. One whole warp.
DEVICE void wait_for_own_rows(const Params& p) {
    const u32* own = symmetric<u32>(p, p.rank, p.rows_ready_at) + p.rank;
    const auto waits = [&] { return !is_set(own) && load_relaxed_gpu(p.header + kHeaderAbort) == 0; };
    while (__ballot_sync(kFullMask, waits()) != 0) continue;
}

// The whole CTA: when rows of all ranks are here, records become the caller's.
DEVICE void end_dispatch(const Params& p, Smem& smem, const Head& head) {
    tell_ranks_when_all(p, head, kBankStaged, p.rows_ready_at);
    if (warp_idx() == 0) wait_for_own_rows(p);
    wait_for_ranks(p, smem, kWaitRows, p.rows_ready_at);
    if (!p.is_cached) {
        const u32* from = record(p, p.rank, 0);
        const u64 end = u64(p.num_received[0]) * kRecordWords;
        for (u64 i = u64(block_idx()) * kNumThreads + thread_idx(); i < end; i += u64(num_blocks()) * kNumThreads) {
            p.own_records[i] = from[i];
        }
    }
    end_transfer(p, head);
}
