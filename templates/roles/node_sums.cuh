// Where rows of a token come together: on the rank of this node that is its rank's rail peer, or its rank itself.

DEVICE i64 node_sum_at(const Params& p, u32 node, u32 token, u32 part) {
    return p.node_sums_at + ((i64(node) * p.rank_capacity + token) * kMaxNodeParts + part) * kRowOutBytes;
}

// Ranks of the node, a bit each, that have brought their row of `token` of `node`. Whoever has seen all leaves zero.
DEVICE u32* arrived(const Params& p, u32 mate, u32 node, u32 token) {
    return symmetric<u32>(p, mate, p.arrived_at) + u64(node) * p.rank_capacity + token;
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
