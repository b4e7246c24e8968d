// Flags in symmetric memory, one of each rank, that tell all ranks of the domain how far a launch is. Relies on
// symmetric.cuh, bank.cuh, and one_domain.cuh or node_domain.cuh.

// Whether the flag of `rank` is of this launch or a later one.
DEVICE bool is_set(const u32* flag) { return i32(load_acquire_sys(flag) - launch_number() - 1) >= 0; }

// Sets the flag at `at` on all ranks of the domain. One whole warp, for what each lane did or knows of. Pairs with
// all_tell.
DEVICE void signal_ranks(const Params& p, i64 at) {
    for (u32 i = lane_idx(); i < kDomainRanks; i += kWarpThreads) {
        store_release_sys(symmetric<u32>(p, first_of_domain(p) + i, at), launch_number() + 1);
    }
}

// Counts at `word`; whoever makes it `all` sets the flag at `at` on those ranks. One whole warp, for what its lanes did
// or know of by a barrier. Pairs with all_tell and wait_for_slots.
DEVICE void tell_ranks(const Params& p, const Head& head, u32 word, u32 all, i64 at) {
    sync_warp();
    u32 num = 0;
    if (lane_idx() == 0) num = fetch_add_acq_rel_gpu(counter(p, head, word), 1) + 1;
    if (__shfl_sync(kFullMask, num, 0) != all) return;
    sync_warp();  // what lane 0 has acquired is ordered before every lane's release
    signal_ranks(p, at);
}

// The whole CTA, after its share of the work.
DEVICE void tell_ranks_when_all(const Params& p, const Head& head, u32 word, i64 at) {
    sync_block();
    if (warp_idx() == 0) tell_ranks(p, head, word, num_blocks(), at + p.rank * 4);
}

// Until the flags at `at` of ranks from `begin` to `end` are set, or false. One whole warp. Pairs with signal_ranks.
DEVICE bool ranks_tell(const Params& p, Wait what, i64 at, u32 begin, u32 end) {
    const u32* flags = symmetric<u32>(p, p.rank, at);
    for (u32 first = begin; first < end; first += kWarpThreads) {
        u32 owing = first;
        const bool in_time = poll_in_time<true>(p, what, owing, launch_number() + 1, [&] {
            const u32 rank = first + lane_idx();
            const u32 unset = __ballot_sync(kFullMask, rank < end && !is_set(flags + rank));
            if (unset != 0) owing = first + __ffs(unset) - 1;
            return unset == 0;
        });
        if (!in_time) return false;
    }
    return true;
}

// The same of all ranks of the domain.
DEVICE bool all_tell(const Params& p, Wait what, i64 at) {
    return ranks_tell(p, what, at, first_of_domain(p), first_of_domain(p) + kDomainRanks);
}
