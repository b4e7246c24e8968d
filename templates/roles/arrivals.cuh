// Rows of tokens as ranks of the node bring them to whoever adds them up: a bit for each rank. Whoever has seen all
// leaves zero for the next launch, in which they bring rows once this rank has entered it.

// Calls `work(lane)` for every lane that `waits`, when `ranks` have brought the rows of its token. One whole warp,
// which may read them by TMA. Pairs with bring_rows.
template <typename Work>
DEVICE void for_each_arrived(const Params& p, bool waits, u32 ranks, u32* arrived, Work work) {
    while (__ballot_sync(kFullMask, waits) != 0) {
        u32 ready = 0, owing = p.rank;
        wait_until<true>(p, kWaitMates, owing, launch_number() + 1, [&] {
            const u32 missing = waits ? ranks & ~load_acquire_sys(arrived) : 0;
            ready = __ballot_sync(kFullMask, waits && missing == 0);
            const u32 late = __ballot_sync(kFullMask, missing != 0);
            if (late != 0) owing = first_of_domain(p) + __ffs(__shfl_sync(kFullMask, missing, __ffs(late) - 1)) - 1;
            return ready != 0;
        });
        const bool is_ready = ready >> lane_idx() & 1;
        if (is_ready) store_relaxed_sys(arrived, 0);
        sync_warp();
        fence_async_global();
        waits = waits && !is_ready;
        for (u32 left = ready; left != 0; left &= left - 1) work(__ffs(left) - 1);
    }
}
