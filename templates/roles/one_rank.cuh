// One rank: tokens, routing and y are the caller's.

DEVICE u32 expert_of_pair(const Params& p, u64 pair) {
    const u64 id = own_id(p, pair);
    return expert_of_id(p, u32(id), u32(id >> 32));
}

// Past the SM's cache: until the previous launch is over, ids may be written.
DEVICE u16 load_expert(const Params& p, u32 pair) {
    const u32* id = reinterpret_cast<const u32*>(p.topk_ids) + (p.ids_are_i64 ? 2 * pair : pair);
    const u32 low = load_relaxed_gpu(id), high = p.ids_are_i64 ? load_relaxed_gpu(id + 1) : 0;
    return u16(expert_of_id(p, low, high));
}

DEVICE float router_weight(const Params& p, u64 pair) { return own_weight(p, pair); }

// Where GEMM 2 leaves a pair's row, and where the sum of a token's rows goes. A row that is its token's only one is
// that sum: nobody counts it or reads it again.
DEVICE bool goes_alone(u32 used) { return __popc(used) == 1; }
DEVICE u16* sum_target(const Params& p, u32 token, u32) { return p.y + i64(token) * p.y_stride; }
DEVICE u16* slice_of_pair(const Params& p, u32 pair, u32 used) {
    return goes_alone(used) ? sum_target(p, pair / kTopK, used) : p.slices + u64(pair) * kHidden;
}

// When a wait of the head has run out of time: the one warp that waited leaves.
DEVICE void abort_head(Smem&) { exit_thread(); }
DEVICE void leave_if_aborted(Smem&) { sync_block(); }

// Launches of one rank are told apart by their parity alone.
DEVICE u32 read_launch_number(const Params&) { return 0; }
DEVICE void publish_launch_number(const Params&, Smem&, u32) {}
DEVICE void end_launch_number(const Params&) {}
