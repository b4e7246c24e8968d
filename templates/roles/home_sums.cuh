// Where rows of a token come together inside one domain: on its rank.

DEVICE u32 taker_of(const Params&, u32 source) { return source; }
DEVICE i64 taken_at(const Params& p, u32, u32 token, u32 part) { return sum_at(p, token, part); }
DEVICE Arrival* arrival(const Params& p, u32 source, u32 token) {
    return symmetric<Arrival>(p, taker_of(p, source), p.arrived_at) + token;
}

// The whole CTA, before roles part: ranks are sent rows when they have entered the launch.
DEVICE void enter_combine(const Params& p, Smem& smem) {
    if (block_idx() == 0 && warp_idx() == 0) signal_ranks(p, p.sums_wanted_at + p.rank * 4);
    wait_for_ranks(p, smem, kWaitSumsWanted, p.sums_wanted_at);
}
