// The head of a decode launch: few pairs are sorted by every CTA for itself, so that weights start to flow without any
// grid-wide wait; bf16 tokens are quantised into Params::pool, unless weights are bf16 too.

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
            u8* row = p.pool + u64(token) * kHidden;
            if constexpr (kHasChunkScales) {
                store_channels(row, channel, make_uint2(q.codes.x, q.codes.y));
                store_channels(row, channel + 8, make_uint2(q.codes.z, q.codes.w));
            } else {
                *reinterpret_cast<uint4*>(row + channel) = q.codes;
            }
            if (lane % 8 == 0) p.pool_scale[u64(token) * kXQuantScaleStride + channel / 128] = q.scale;
        }
    }
}

// A warp copies 256 channels of a token at a time.
DEVICE void order_tokens(const Params& p) {
    constexpr u32 kUnits = ceil_div(kHidden, 256);
    const u32 warps = kNumThreads / kWarpThreads;
    const u64 num_units = u64(p.num_tokens) * kUnits;
    for (u64 unit = u64(warp_idx()) * num_blocks() + block_idx(); unit < num_units; unit += warps * num_blocks()) {
        const u32 token = u32(unit / kUnits), channel = u32(unit % kUnits) * 256 + lane_idx() * 8;
        if (channel >= kHidden) continue;
        const u8* source = p.x + i64(token) * p.x_stride + channel * kElementBytes;
        u8* row = p.pool + u64(token) * (kHidden * kElementBytes);
        if constexpr (kQuantizes) {
            store_channels(row, channel, *reinterpret_cast<const uint2*>(source));
        } else {
            store_channels(row, channel, *reinterpret_cast<const uint4*>(source));
        }
    }
}

// The math warps sort; the others wait for the previous launch.
constexpr u32 kSortWarps = kNumMathWarps;
constexpr u32 kSortThreads = kSortWarps * kWarpThreads;

DEVICE u32 sort_warp() { return warp_idx() - kMathWarpBegin; }
DEVICE u32 sort_thread() { return thread_idx() - kFirstMathThread; }

// Experts of pairs i, i + kThreads, ..., all loads in flight together.
template <u32 kThreads>
struct Experts {
    static constexpr u32 kNum = ceil_div(kNumLocalPairs, kThreads);
    // All loads, but of a rank of one expert and one slot, where that spills.
    static constexpr u32 kAtOnce = kNumRanks > 1 && kNumExperts == 1 && kTopK == 1 ? 4 : kNum;
    u16 of[kNum];

    DEVICE void load(const Params& p, u32 i) {
        const u32 num_pairs = p.num_tokens * kTopK;
#pragma unroll kAtOnce
        for (u32 n = 0; n < kNum; ++n, i += kThreads) {
            if (n * kThreads >= num_pairs) break;
            of[n] = i < num_pairs ? load_expert(p, i) : 0;
        }
    }
};

// What the local sort needs. It aliases the token ring, which cp.async fills later: the same proxy, so a CTA barrier
// orders the two.
struct LocalSort {
    u16 counts[kSortWarps][kNumExperts], num_rows[kNumExperts];
    u16 experts[kNumLocalPairs];
    u32 is_stale;
};

struct WarpPairs {
    u32 begin, end;
};

DEVICE WarpPairs pairs_of_warp(const Params& p) {
    const u32 num_pairs = p.num_tokens * kTopK;
    const u32 share = ceil_div(num_pairs, kSortThreads) * kWarpThreads;
    const u32 begin = min_of(sort_warp() * share, num_pairs);
    return {begin, min_of(begin + share, num_pairs)};
}

// Lanes with the same expert. A vote a bit: __match_any_sync takes a step for each different value.
DEVICE u32 lanes_with(u32 expert) {
    u32 same = kFullMask;
#pragma unroll
    for (u32 bit = 1; bit <= kNumExperts; bit *= 2) {
        const u32 votes = __ballot_sync(kFullMask, (expert & bit) != 0);
        same &= (expert & bit) != 0 ? votes : ~votes;
    }
    return same;
}

// Few pairs: every CTA sorts all of them into its own shared memory and waits for nobody. CTAs must agree on the rows,
// so the sort is stable: each warp takes consecutive pairs, counts them by expert in a row of `counts` of its own,
// starts after the warps before it, and ranks its pairs 32 at a time by matching experts. One lane writes for each
// expert.
DEVICE void count_locally(const Params& p, Smem& smem, LocalSort& sort) {
    const u32 num_pairs = p.num_tokens * kTopK, lanes_before = (1u << lane_idx()) - 1;
    u16* mine = sort.counts[sort_warp()];
    Experts<kSortThreads> experts;
    experts.load(p, sort_thread());
    for (u32 e = lane_idx(); e < kNumExperts; e += kWarpThreads) mine[e] = 0;
    if (sort_thread() == 0) sort.is_stale = 0;
#pragma unroll
    for (u32 n = 0, pair = sort_thread(); n < experts.kNum; ++n, pair += kSortThreads) {
        if (n * kSortThreads >= num_pairs) break;
        if (pair < num_pairs) sort.experts[pair] = experts.of[n];
    }
    sync_math();
    const WarpPairs pairs = pairs_of_warp(p);
    for (u32 start = pairs.begin; start < pairs.end; start += kWarpThreads) {
        const u32 pair = start + lane_idx();
        const u32 expert = pair < pairs.end ? sort.experts[pair] : kNumExperts;
        const u32 same = lanes_with(expert);
        if (expert < kNumExperts && (same & lanes_before) == 0) mine[expert] += u16(__popc(same));
        sync_warp();
    }
    sync_math();
    for (u32 e = sort_thread(); e < kNumExperts; e += kSortThreads) {
        u32 rows = 0;
        for (u32 warp = 0; warp < kSortWarps; ++warp) {
            const u32 warp_rows = sort.counts[warp][e];
            sort.counts[warp][e] = u16(rows);
            rows += warp_rows;
        }
        sort.num_rows[e] = u16(rows);
    }
    sync_math();
    if (sort_warp() == 0) prefix_sums(smem, sort.num_rows);
}

DEVICE void rank_locally(const Params& p, Smem& smem, LocalSort& sort) {
    const u32 lanes_before = (1u << lane_idx()) - 1;
    u16* mine = sort.counts[sort_warp()];
    const WarpPairs pairs = pairs_of_warp(p);
    for (u32 first = pairs.begin; first < pairs.end; first += kWarpThreads) {
        const u32 pair = first + lane_idx();
        const u32 expert = pair < pairs.end ? sort.experts[pair] : kNumExperts;
        const u32 same = lanes_with(expert);
        const u32 row = expert < kNumExperts ? mine[expert] : 0;
        sync_warp();
        if (expert < kNumExperts) {
            smem.local_rows[smem.row_start[expert] + row + __popc(same & lanes_before)] = u16(pair);
            if ((same & lanes_before) == 0) mine[expert] = u16(row + __popc(same));
        }
        sync_warp();
    }
}

// The pairs of the first task's rows, as role_schedule would publish them. One warp, after a barrier of the warps that
// sort.
DEVICE void write_first_rows(Smem& smem) {
    if (smem.first[kFirstPreloaded] == 0) return;
    const Task task = read_task(smem, 0);
    for (u32 row = lane_idx(); row < task.num_rows; row += kWarpThreads) {
        smem.task_rows[0][row] = smem.local_rows[task.row_start + row];
    }
}

// Sorts what the ids are before the previous launch is over, so that weights flow already, and again if they were
// written meanwhile. The warps that do not sort look at the ids again as soon as they may: once the weights flow, every
// access to memory takes microseconds.
DEVICE void sort_early(const Params& p, Smem& smem, bool alone) {
    LocalSort& sort = *reinterpret_cast<LocalSort*>(smem.token_tiles);
    static_assert(sizeof(LocalSort) <= sizeof(Smem::token_tiles), "sorting aliases the token ring");
    constexpr u32 kOthers = kNumThreads - kSortThreads;
    const bool sorts = warp_idx() >= kMathWarpBegin;
    const First first = begin_head(p);
    Experts<kOthers> now;
    if (sorts) {
        count_locally(p, smem, sort);
        publish_first(p, smem, first);
        sync_math();
        if (alone && sort_thread() == 0) preload_weights(p, smem);
        rank_locally(p, smem, sort);
        sync_math();
        if (sort_warp() == 0) write_first_rows(smem);
    }
    wait_for_previous_launch();
    if (!sorts) now.load(p, thread_idx());
    sync_block();
    if (!sorts) {
        bool is_stale = false;
#pragma unroll
        for (u32 n = 0, pair = thread_idx(); n < now.kNum; ++n, pair += kOthers) {
            if (n * kOthers >= p.num_tokens * kTopK) break;
            is_stale |= pair < p.num_tokens * kTopK && now.of[n] != sort.experts[pair];
        }
        if (is_stale) fetch_add_shared(&sort.is_stale, 1);
    }
    sync_block();
    if (sort.is_stale == 0) return;
    if (sorts && sort_thread() == 0) drop_preloaded(p, smem);
    sync_block();
    if (sorts) {
        count_locally(p, smem, sort);
        sync_math();
        rank_locally(p, smem, sort);
    }
}

DEVICE void sort_together(const Params& p, Smem& smem, const Head& head) {
    struct Counts {  // in the token ring too
        u32 totals[kNumExperts], next[kNumExperts];
    };
    static_assert(sizeof(Counts) <= sizeof(Smem::token_tiles), "counts alias the token ring");
    Counts& counts = *reinterpret_cast<Counts*>(smem.token_tiles);
    const u32 num_pairs = p.num_tokens * kTopK;
    const u32 share = ceil_div(num_pairs, num_blocks());
    const u32 begin = min_of(share * block_idx(), num_pairs);
    const u32 end = min_of(begin + share, num_pairs);
    reserve_rows(p, smem, head, begin, end, counts.totals, counts.next);
    for (u32 pair = begin + thread_idx(); pair < end; pair += kNumThreads) {
        const u32 expert = expert_of_pair(p, pair);
        if (expert < kNumExperts) p.row_pairs[fetch_add_shared(counts.next + expert, 1)] = pair;
    }
}

// 16 bytes of a row, from byte `at` on, in the order that math reads.
DEVICE void store_piece(u8* row, u32 at, const uint4& piece) {
    if constexpr (!kHasChunkScales) {
        *reinterpret_cast<uint4*>(row + at) = piece;
    } else if constexpr (kQuantizes) {
        store_channels(row, at, make_uint2(piece.x, piece.y));
        store_channels(row, at + 8, make_uint2(piece.z, piece.w));
    } else {
        store_channels(row, at / kElementBytes, piece);
    }
}

// Many ranks: tokens of all that experts here want, one a warp.
DEVICE void fetch_tokens(const Params& p) {
    constexpr u32 kWarps = kNumThreads / kWarpThreads;
    for (u32 token = warp_idx() * num_blocks() + block_idx(); token < p.num_tokens; token += kWarps * num_blocks()) {
        const u64 pair = u64(token) * kTopK + lane_idx();
        if (__ballot_sync(kFullMask, lane_idx() < kTopK && expert_of_pair(p, pair) < kNumExperts) == 0) continue;
        constexpr u32 kRowBytes = kHidden * kElementBytes;
        u8* row = p.pool + u64(token) * kRowBytes;
        fetch_token(
            p, token,
            [&](u32 first, const uint4(&pieces)[kFetchBatch]) {
#pragma unroll
                for (u32 i = 0; i < kFetchBatch; ++i) {
                    const u32 at = first + i * 512;
                    if (at < kRowBytes) store_piece(row, at, pieces[i]);
                }
            },
            [&](u32 group, float scale) { p.pool_scale[u64(token) * kXQuantScaleStride + group] = scale; });
    }
}

DEVICE void sort_once(const Params& p, Smem& smem) {
    LocalSort& sort = *reinterpret_cast<LocalSort*>(smem.token_tiles);
    if (warp_idx() < kMathWarpBegin) return;
    count_locally(p, smem, sort);
    sync_math();
    if (sort_thread() == 0) preload_weights(p, smem);
    rank_locally(p, smem, sort);
    sync_math();
    if (sort_warp() == 0) write_first_rows(smem);
}

DEVICE Head run_head(const Params& p, Smem& smem) {
    const bool local = p.num_tokens * kTopK <= kNumLocalPairs;
    const bool alone = kNumRanks == 1 && local && !quantizes_x(p);
    if (kNumRanks == 1 && local) {
        sort_early(p, smem, alone);
    } else {
        wait_for_previous_launch();
        publish_first(p, smem, begin_head(p));
        sync_block();
    }
    const Head head{smem.first[kFirstParity], local, alone};
    clear_other_bank(p, head.parity);
    bring_pairs(p, smem, head);
    if constexpr (kNumRanks > 1) {
        if (local) sort_once(p, smem);
    } else if (quantizes_x(p)) {
        quantize_tokens(p);
    } else if (copies_x(p)) {
        order_tokens(p);
    }
    if (!local) sort_together(p, smem, head);
    wait_for_tokens(p, smem);
    if constexpr (kNumRanks > 1) fetch_tokens(p);
    sync_block();
    if (!alone && thread_idx() == 0) end_head(p, head);  // else role_schedule does it
    return head;
}

DEVICE u32 pair_of_row(const Params& p, const Smem& smem, const Head& head, u32 row) {
    return head.local ? u32(smem.local_rows[row]) : p.row_pairs[row];
}
DEVICE u32 use_of_row(const Params& p, u32, u32 pair) { return row_use(p, pair); }
