// The head of a decode launch: few pairs are sorted by every CTA for itself, so that weights start to flow without any
// grid-wide wait; bf16 tokens are quantised into Params::pool.

// A warp quantises 512 channels of a token at a time.
DEVICE void quantize_tokens(const Params& p) {
    constexpr u32 kUnits = ceil_div(kHidden, 512);
    const u32 lane = lane_idx();
    const u32 warps = kNumThreads / kWarpThreads;
    const u64 num_units = u64(p.num_tokens) * kUnits;
    for (u64 unit = u64(warp_idx()) * num_blocks() + block_idx(); unit < num_units; unit += warps * num_blocks()) {
        const u32 token = u32(unit / kUnits);
        const u32 channel = u32(unit % kUnits) * 512 + lane * 16;
        uint4 raw[2] = {};
        if (channel < kHidden) {
            const uint4* source = reinterpret_cast<const uint4*>(p.x + i64(token) * p.x_stride + i64(channel) * 2);
            raw[0] = source[0];
            raw[1] = source[1];
        }
        const Quantized q = quantize_16(raw);
        if (channel < kHidden) {
            *reinterpret_cast<uint4*>(p.pool + u64(token) * kHidden + channel) = q.codes;
            if (lane % 8 == 0) p.pool_scale[u64(token) * kXQuantScaleStride + channel / 128] = q.scale;
        }
    }
}

// Few pairs: every CTA sorts all of them into its own shared memory and waits for nobody. CTAs must agree on the rows,
// so the sort is stable: each warp takes consecutive pairs, counts them by expert in a row of `counts` of its own,
// starts after the warps before it, and ranks its pairs 32 at a time by matching experts. One lane writes for each
// expert.
DEVICE void sort_locally(const Params& p, Smem& smem, u16 (*counts)[kNumExperts], u32* num_rows) {
    constexpr u32 kWarps = kNumThreads / kWarpThreads;
    const u32 num_pairs = p.num_tokens * kTopK;
    const u32 share = ceil_div(num_pairs, kNumThreads) * kWarpThreads;
    const u32 begin = min_of(warp_idx() * share, num_pairs), end = min_of(begin + share, num_pairs);
    u16* mine = counts[warp_idx()];
    const u32 lanes_before = (1u << lane_idx()) - 1;
    for (u32 e = lane_idx(); e < kNumExperts; e += kWarpThreads) mine[e] = 0;
    sync_warp();
    for (u32 first = begin; first < end; first += kWarpThreads) {
        const u32 pair = first + lane_idx();
        const u32 expert = pair < end ? expert_of_pair(p, pair) : kNumExperts;
        const u32 same = __match_any_sync(kFullMask, expert);
        if (expert < kNumExperts && (same & lanes_before) == 0) mine[expert] += u16(__popc(same));
        sync_warp();
    }
    sync_block();
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) {
        u32 rows = 0;
        for (u32 warp = 0; warp < kWarps; ++warp) {
            const u32 warp_rows = counts[warp][e];
            counts[warp][e] = u16(rows);
            rows += warp_rows;
        }
        num_rows[e] = rows;
    }
    sync_block();
    if (warp_idx() == 0) prefix_sums(smem, num_rows);
    sync_block();
    for (u32 first = begin; first < end; first += kWarpThreads) {
        const u32 pair = first + lane_idx();
        const u32 expert = pair < end ? expert_of_pair(p, pair) : kNumExperts;
        const u32 same = __match_any_sync(kFullMask, expert);
        const u32 row = expert < kNumExperts ? mine[expert] : 0;
        sync_warp();
        if (expert < kNumExperts) {
            smem.local_rows[smem.row_start[expert] + row + __popc(same & lanes_before)] = u16(pair);
            if ((same & lanes_before) == 0) mine[expert] = u16(row + __popc(same));
        }
        sync_warp();
    }
}

DEVICE void sort_together(const Params& p, Smem& smem, const Head& head, u32* counts, u32* next) {
    const u32 num_pairs = p.num_tokens * kTopK;
    const u32 share = ceil_div(num_pairs, num_blocks());
    const u32 begin = min_of(share * block_idx(), num_pairs);
    const u32 end = min_of(begin + share, num_pairs);
    reserve_rows(p, smem, head, begin, end, counts, next);
    for (u32 pair = begin + thread_idx(); pair < end; pair += kNumThreads) {
        const u32 expert = expert_of_pair(p, pair);
        if (expert < kNumExperts) p.row_pairs[fetch_add_shared(next + expert, 1)] = pair;
    }
}

DEVICE Head run_head(const Params& p, Smem& smem) {
    const Head head = begin_head(p, p.num_tokens * kTopK <= kNumLocalPairs);
    if (p.x_is_bf16) quantize_tokens(p);
    // Counts alias the token ring, which cp.async fills later: the same proxy, so a CTA barrier orders the two.
    struct Counts {
        u32 totals[kNumExperts], next[kNumExperts];
        u16 of_warp[kNumThreads / kWarpThreads][kNumExperts];
    };
    static_assert(sizeof(Counts) <= sizeof(Smem::token_tiles), "counts alias the token ring");
    Counts& counts = *reinterpret_cast<Counts*>(smem.token_tiles);
    if (head.local) {
        sort_locally(p, smem, counts.of_warp, counts.totals);
    } else {
        sort_together(p, smem, head, counts.totals, counts.next);
    }
    sync_block();
    end_head(p, head);
    return head;
}

DEVICE u32 pair_of_row(const Params& p, const Smem& smem, const Head& head, u32 row) {
    return head.local ? u32(smem.local_rows[row]) : p.row_pairs[row];
}
