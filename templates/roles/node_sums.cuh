// Where rows of a token come together on a node: on the rank of this node that is its rank's rail peer, or its rank
// itself.

DEVICE u32 taker_of(const Params& p, u32 source) { return first_of_domain(p) + source % kNodeRanks; }
DEVICE i64 taken_at(const Params& p, u32 source, u32 token, u32 part) {
    const i64 tokens_before = i64(source / kNodeRanks) * p.rank_capacity + token;
    return p.node_sums_at + (tokens_before * kMaxNodeParts + part) * kRowOutBytes;
}
DEVICE u32* arrived_of(const Params& p, u32 source, u32 token) {
    u32* of_nodes = symmetric<u32>(p, taker_of(p, source), p.arrived_at);
    return of_nodes + u64(source / kNodeRanks) * p.rank_capacity + token;
}

// The whole CTA, before roles part: ranks of this node may be brought rows when they have entered the launch, rail
// peers are told that this one has.
DEVICE void enter_combine(const Params& p, Smem& smem) {
    if (block_idx() == 0 && warp_idx() == 0) {
        signal_ranks(p, p.sums_wanted_at + p.rank * 4);
        for (u32 node = 0; node < kNumNodes; ++node) {
            if (node != own_node(p)) enter_rail(p, node);
        }
    }
    wait_for_ranks(p, smem, kWaitSumsWanted, p.sums_wanted_at);
}
