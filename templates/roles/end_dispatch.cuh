// The whole CTA: when rows of all ranks are here, records become the caller's.
DEVICE void end_dispatch(const Params& p, Smem& smem, const Head& head) {
    tell_ranks_when_all(p, head, kBankStaged, p.rows_ready_at);
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
