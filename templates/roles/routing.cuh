// The head, run by every warp before the roles part: re-quantise bf16 tokens, clear what no expert writes, sort the
// routed pairs by expert. A pair is token * top_k + slot; a row is a pair's position after sorting; experts own ranges
// of rows (Smem::row_start) and of blocks of kBlockTokens rows (Smem::block_start).

// Words of one bank of counters. Launches alternate between two banks and each zeroes the other's, so nothing needs a
// memset between launches. Counters that many CTAs poll or add to have 128 bytes of their own.
constexpr u32 kBankTask = 0;      // tasks claimed beyond the first of every CTA
constexpr u32 kBankBarrier = 32;  // CTAs at the grid barrier
constexpr u32 kBankHead = 64;     // CTAs that finished the head
constexpr u32 kBankCounts = 96;   // rows of each expert
constexpr u32 kBankBlocks = kBankCounts + kNumExperts;  // GEMM 1 tiles finished, by block

struct Head {
    u32 parity;  // of the launch: which bank it counts in
    bool local;  // rows are sorted in shared memory, by every CTA for itself
};

// Worked out where needed: a pointer held through a role costs registers.
DEVICE u32* counter(const Params& p, const Head& head, u32 word) {
    return p.banks + u64(head.parity) * p.bank_words + word;
}

DEVICE u32 expert_of_pair(const Params& p, u64 pair) {
    // An id outside [0, kNumExperts) marks an unused slot; as unsigned it is never below kNumExperts.
    const u64 id = p.ids_are_i64 ? reinterpret_cast<const u64*>(p.topk_ids)[pair]
                                 : u64(reinterpret_cast<const u32*>(p.topk_ids)[pair]);
    return id < kNumExperts ? u32(id) : kNumExperts;
}

DEVICE float router_weight(const Params& p, u64 pair) {
    return p.weights_are_bf16 ? bf16_low(reinterpret_cast<const u16*>(p.topk_weights)[pair])
                              : reinterpret_cast<const float*>(p.topk_weights)[pair];
}

// Bit s is set if slot s of the token holds an expert.
DEVICE u32 used_slots(const Params& p, u32 token) {
    u32 used = 0;
#pragma unroll
    for (u32 slot = 0; slot < kTopK; ++slot) {
        used |= u32(expert_of_pair(p, u64(token) * kTopK + slot) < kNumExperts) << slot;
    }
    return used;
}

// Scale of a quantisation group and the factor that takes its values to e4m3 (reference.quantize_tokens).
DEVICE float quant_scale(float amax) { return fmaxf(amax, 1e-10f) * (1.0f / 448.0f); }
DEVICE float quant_factor(float amax) { return __fdiv_rn(448.0f, fmaxf(amax, 1e-10f)); }

// A warp quantises 512 channels of a token at a time: 8 lanes a group of 128, 16 channels a lane.
DEVICE void quantize_tokens(const Params& p) {
    constexpr u32 kUnits = ceil_div(kHidden, 512);
    const u32 lane = lane_idx();
    const u32 warps = kNumThreads / kWarpThreads;
    const u64 num_units = u64(p.num_tokens) * kUnits;
    for (u64 unit = u64(warp_idx()) * num_blocks() + block_idx(); unit < num_units; unit += warps * num_blocks()) {
        const u32 token = u32(unit / kUnits);
        const u32 channel = u32(unit % kUnits) * 512 + lane * 16;
        const bool inside = channel < kHidden;
        uint4 raw[2] = {};
        if (inside) {
            const uint4* source = reinterpret_cast<const uint4*>(p.x + i64(token) * p.x_stride + i64(channel) * 2);
            raw[0] = source[0];
            raw[1] = source[1];
        }
        const u32 words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
        float amax = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) amax = fmaxf(amax, fmaxf(fabsf(bf16_low(words[i])), fabsf(bf16_high(words[i]))));
#pragma unroll
        for (u32 mask = 1; mask < 8; mask *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, mask));
        const float factor = quant_factor(amax);
        u32 codes[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            codes[i] = pack_e4m3(bf16_low(words[2 * i]) * factor, bf16_high(words[2 * i]) * factor) |
                       pack_e4m3(bf16_low(words[2 * i + 1]) * factor, bf16_high(words[2 * i + 1]) * factor) << 16;
        }
        if (inside) {
            *reinterpret_cast<uint4*>(p.x_quant + u64(token) * kHidden + channel) =
                make_uint4(codes[0], codes[1], codes[2], codes[3]);
            if (lane % 8 == 0) p.x_quant_scale[u64(token) * kXQuantScaleStride + channel / 128] = quant_scale(amax);
        }
    }
}

// Tokens without any expert get a zero row: no tile reaches them.
DEVICE void clear_unrouted_tokens(const Params& p) {
    const u32 warps = kNumThreads / kWarpThreads;
    for (u32 token = warp_idx() * num_blocks() + block_idx(); token < p.num_tokens; token += warps * num_blocks()) {
        if (used_slots(p, token) != 0) continue;
        for (u32 channel = lane_idx() * 8; channel < kHidden; channel += kWarpThreads * 8) {
            *reinterpret_cast<uint4*>(p.y + i64(token) * p.y_stride + channel) = make_uint4(0, 0, 0, 0);
        }
    }
}

// Turns rows per expert into starts of rows and of blocks. One warp; lane l sums a contiguous part of the experts.
DEVICE void prefix_sums(Smem& smem, const u32* num_rows) {
    constexpr u32 kPart = ceil_div(kNumExperts, kWarpThreads);
    const u32 begin = lane_idx() * kPart;
    u32 rows = 0, blocks = 0;
    for (u32 e = begin; e < min_of(begin + kPart, kNumExperts); ++e) {
        rows += num_rows[e];
        blocks += ceil_div(num_rows[e], kBlockTokens);
    }
    u32 rows_before = rows, blocks_before = blocks;
#pragma unroll
    for (u32 distance = 1; distance < kWarpThreads; distance *= 2) {
        const u32 r = __shfl_up_sync(kFullMask, rows_before, distance);
        const u32 b = __shfl_up_sync(kFullMask, blocks_before, distance);
        rows_before += lane_idx() >= distance ? r : 0;
        blocks_before += lane_idx() >= distance ? b : 0;
    }
    rows_before -= rows;
    blocks_before -= blocks;
    for (u32 e = begin; e < min_of(begin + kPart, kNumExperts); ++e) {
        smem.row_start[e] = rows_before;
        smem.block_start[e] = blocks_before;
        rows_before += num_rows[e];
        blocks_before += ceil_div(num_rows[e], kBlockTokens);
    }
    if (lane_idx() == kWarpThreads - 1) {
        smem.row_start[kNumExperts] = rows_before;
        smem.block_start[kNumExperts] = blocks_before;
    }
}

DEVICE void count_pairs(const Params& p, u32* counts, u32 begin, u32 end) {
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) counts[e] = 0;
    sync_block();
    for (u32 pair = begin + thread_idx(); pair < end; pair += kNumThreads) {
        const u32 expert = expert_of_pair(p, pair);
        if (expert < kNumExperts) fetch_add_shared(counts + expert, 1);
    }
    sync_block();
}

// Few pairs: every CTA sorts all of them into its own shared memory and waits for nobody. CTAs must agree on the rows, so
// the sort is stable: each warp takes consecutive pairs, counts them by expert in a row of `counts` of its own, starts
// after the warps before it, and ranks its pairs 32 at a time by matching experts. One lane writes for each expert.
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

// Many pairs: every CTA counts its share, reserves rows with one atomic an expert, and after a grid barrier knows the
// totals and writes its share of Params::row_pairs. The order of rows inside an expert varies from run to run; no
// result depends on it.
DEVICE void sort_together(const Params& p, Smem& smem, const Head& head, u32* counts, u32* next) {
    u32* rows_of_expert = counter(p, head, kBankCounts);
    const u32 num_pairs = p.num_tokens * kTopK;
    const u32 share = ceil_div(num_pairs, num_blocks());
    const u32 begin = min_of(share * block_idx(), num_pairs);
    const u32 end = min_of(begin + share, num_pairs);
    count_pairs(p, counts, begin, end);
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) {
        next[e] = counts[e] ? fetch_add_relaxed_gpu(rows_of_expert + e, counts[e]) : 0;
    }
    sync_block();
    if (thread_idx() == 0) sync_grid(p, counter(p, head, kBankBarrier));
    sync_block();
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) counts[e] = load_relaxed_gpu(rows_of_expert + e);
    sync_block();
    if (warp_idx() == 0) prefix_sums(smem, counts);
    sync_block();
    for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) next[e] += smem.row_start[e];
    sync_block();
    for (u32 pair = begin + thread_idx(); pair < end; pair += kNumThreads) {
        const u32 expert = expert_of_pair(p, pair);
        if (expert < kNumExperts) p.row_pairs[fetch_add_shared(next + expert, 1)] = pair;
    }
}

DEVICE Head run_head(const Params& p, Smem& smem) {
    const Head head{load_relaxed_gpu(p.header + kHeaderParity) & 1, p.num_tokens * kTopK <= kNumLocalPairs};
    // The other bank served the previous launch, which is over.
    u32* other = p.banks + u64(head.parity ^ 1) * p.bank_words;
    for (u32 i = block_idx() * kNumThreads + thread_idx(); i < p.bank_words; i += num_blocks() * kNumThreads) {
        other[i] = 0;
    }
    if (p.x_is_bf16) quantize_tokens(p);
    clear_unrouted_tokens(p);

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
    // Pairs with wait_for_head. The last CTA to come has seen every CTA read the parity and turns it.
    if (thread_idx() == 0 && fetch_add_acq_rel_gpu(counter(p, head, kBankHead), 1) == num_blocks() - 1) {
        store_relaxed_gpu(p.header + kHeaderParity, head.parity ^ 1);
    }
    return head;
}

// Until every CTA has written its share of row_pairs and x_quant. Pairs with run_head.
DEVICE void wait_for_head(const Params& p, const Head& head) {
    const u32 expected = num_blocks();
    wait_until(p, kWaitHead, 0, expected, [&] { return load_acquire_gpu(counter(p, head, kBankHead)) == expected; });
}
