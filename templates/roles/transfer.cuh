// Begin and end of a launch that carries rows between ranks. Relies on bank.cuh and symmetric.cuh.

// The whole CTA. The launch before is over.
DEVICE Head begin_transfer(const Params& p, Smem& smem) {
    if (thread_idx() == 0) {
        smem.first[kFirstParity] = load_acquire_gpu(p.header + kHeaderParity) & 1;
        publish_launch_number(p, smem, read_launch_number(p));
    }
    leave_if_aborted(smem);
    const Head head{smem.first[kFirstParity]};
    clear_other_bank(p, head.parity);
    return head;
}

// The whole CTA, when it needs nothing of other ranks any more.
DEVICE void end_transfer(const Params& p, const Head& head) {
    sync_block();
    if (thread_idx() == 0) end_head(p, head);
}

// Until all ranks' flags at `at` are set; the whole CTA, which leaves otherwise. Pairs with signal_ranks.
DEVICE void wait_for_ranks(const Params& p, Smem& smem, Wait what, i64 at) {
    if (warp_idx() == 0 && !all_tell(p, what, at)) abort_head(smem);
    leave_if_aborted(smem);
}
