// A rank's counts reach those of its node at once, and others through its rail peers, which pass them on.

DEVICE void tell_total(const Params& p, u32 column, u32 total) {
    for (u32 i = 0; i < kDomainRanks; ++i) counts_of(p, first_of_domain(p) + i, p.rank)[column] = total;
}

// Counts that came along the rail, and that they came, to the ranks of this node. One whole warp. Pairs with
// ranks_tell.
DEVICE bool pass_on(const Params& p, u32 node) {
    const u32 rank = rail_rank(p, node);
    const auto came = [&] { return __ballot_sync(kFullMask, !rail_entered(p, node)) == 0; };
    if (!came() && !poll_in_time<true>(p, kWaitRail, rank, launch_number() + 1, came)) return false;
    if (!p.is_cached) {
        const u32* counts = counts_of(p, p.rank, rank);
        for (u32 c = lane_idx(); c < kNumColumns; c += kWarpThreads) {
            const u32 count = counts[c];
            for (u32 i = 0; i < kDomainRanks; ++i) {
                const u32 mate = first_of_domain(p) + i;
                if (mate != p.rank) counts_of(p, mate, rank)[c] = count;
            }
        }
        sync_warp();
    }
    signal_ranks(p, p.counts_ready_at + rank * 4);
    return true;
}

// Notify warps of one CTA, behind a barrier of theirs; a node for each in turn.
DEVICE void tell_ready(const Params& p, Smem& smem) {
    const u32 warp = warp_idx();
    if (warp == 0) signal_ranks(p, p.counts_ready_at + p.rank * 4);
    for (u32 node = warp; node < kNumNodes; node += kNumNotifyWarps) {
        if (node == own_node(p)) continue;
        if (!p.is_cached) put(p, node, counts_at(p, p.rank), counts_at(p, p.rank), kCountWords * 4);
        enter_rail(p, node);
    }
    for (u32 node = warp; node < kNumNodes; node += kNumNotifyWarps) {
        if (node != own_node(p) && !pass_on(p, node)) return abort_head(smem);
    }
    flush(p);
}

// Until the counts of all ranks are here, or false. One whole warp. Those of this node first: they have not passed on
// what comes by them, if they are lost.
DEVICE bool counts_came(const Params& p) {
    return all_tell(p, kWaitCounts, p.counts_ready_at) && ranks_tell(p, kWaitCounts, p.counts_ready_at, 0, kNumRanks);
}

// Which tokens here came from which rank: combine takes them in turn. One whole warp, behind ranks_tell.
DEVICE void note_sources(const Params& p) {
    u32 first = 0;
    for (u32 begin = 0; begin < kNumRanks; begin += kWarpThreads) {
        const u32 rank = begin + lane_idx();
        const u32 count = rank < kNumRanks ? counts_of(p, p.rank, rank)[kNumAllExperts + p.rank] : 0;
        u32 end = count;
#pragma unroll
        for (u32 distance = 1; distance < kWarpThreads; distance *= 2) {
            const u32 lower = __shfl_up_sync(kFullMask, end, distance);
            end += lane_idx() >= distance ? lower : 0;
        }
        if (rank < kNumRanks) p.source_starts[rank + 1] = first + end;
        first += __shfl_sync(kFullMask, end, kWarpThreads - 1);
    }
    if (lane_idx() == 0) p.source_starts[0] = 0;
}
