// A rank's counts reach all others at once.

DEVICE void tell_total(const Params& p, u32 column, u32 total) {
    for (u32 rank = 0; rank < kNumRanks; ++rank) counts_of(p, rank, p.rank)[column] = total;
}

// Notify warps of one CTA, behind a barrier of theirs. Pairs with ranks_tell.
DEVICE void tell_ready(const Params& p, Smem&) {
    if (warp_idx() == 0) signal_ranks(p, p.counts_ready_at + p.rank * 4);
}

// Until the counts of all ranks are here, or false. One whole warp.
DEVICE bool counts_came(const Params& p) { return all_tell(p, kWaitCounts, p.counts_ready_at); }

// Nobody asks which tokens came from which rank.
DEVICE void note_sources(const Params&) {}
