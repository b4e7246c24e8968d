// Rows of tokens as ranks bring them to whoever adds them up: a bit for each rank of the domain, and how many warps
// have seen all. The last of them leaves zeros for the next launch, in which rows come once this rank has entered it.

struct Arrival {
    u64 ranks;
    u32 num_done, unused;
};

// Calls `work(lane)` for every lane that `waits`, when `ranks` have brought the rows of its token; it has seen them as
// one of `num_warps`. One whole warp. Pairs with bring_rows.
template <typename Work>
DEVICE void for_each_arrived(const Params& p, Wait what, bool waits, u64 ranks, Arrival* of, u32 num_warps, Work work) {
    while (__ballot_sync(kFullMask, waits) != 0) {
        u32 ready = 0, owing = p.rank;
        wait_until(p, what, owing, launch_number() + 1, [&] {
            const u64 missing = waits ? ranks & ~load_acquire_sys(&of->ranks) : 0;
            ready = __ballot_sync(kFullMask, waits && missing == 0);
            const u32 late = __ballot_sync(kFullMask, missing != 0), low = u32(missing);
            const u32 first = low != 0 ? __ffs(low) - 1 : 31 + __ffs(u32(missing >> 32));
            if (late != 0) owing = first_of_domain(p) + __shfl_sync(kFullMask, first, __ffs(late) - 1);
            return ready != 0;
        });
        const bool is_ready = ready >> lane_idx() & 1;
        if (is_ready && ranks != 0 && (num_warps == 1 || fetch_add_acq_rel_gpu(&of->num_done, 1) == num_warps - 1)) {
            store_relaxed_sys(&of->ranks, 0);
            store_relaxed_sys(&of->num_done, 0);
        }
        sync_warp();
        fence_async_global();
        waits = waits && !is_ready;
        for (u32 left = ready; left != 0; left &= left - 1) work(__ffs(left) - 1);
    }
}
