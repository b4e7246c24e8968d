// Between ranks: routing goes to all, tokens lie ready for whoever needs them. Relies on many_ranks.cuh, flags.cuh and
// routing.cuh.

// What GEMM 2 must know of a row: the slots of its token that hold experts here or, where rows travel as they are, its
// home.
DEVICE u32 row_use(const Params& p, u32 pair) { return kPresum ? used_slots(p, pair / kTopK) : home_of_pair(p, pair); }

// The rows that each rank takes its share of the batch to have, on `rank`. Where they differ, tables do not mean the
// same to all.
DEVICE u32* bounds(const Params& p, u32 rank) {
    return symmetric<u32>(p, rank, p.bounds_at) + launch_number() % 2 * kNumRanks;
}

DEVICE bool bounds_agree(const Params& p) {
    for (u32 first = 0; first < kNumRanks; first += kWarpThreads) {
        const u32 rank = first + lane_idx();
        const u32 bound = rank < kNumRanks ? bounds(p, p.rank)[rank] : p.rank_tokens;
        if (bound != p.rank_tokens) report_timeout(p, kWaitBound, rank, bound);
        if (__ballot_sync(kFullMask, bound != p.rank_tokens) != 0) return false;
    }
    return true;
}

// The whole CTA, until the pairs or the tokens of all ranks are there.
DEVICE void wait_for_pairs(const Params& p, Smem& smem) {
    if (warp_idx() == 0 && !(all_tell(p, kWaitPairs, p.pairs_ready_at) && bounds_agree(p))) abort_head(smem);
    leave_if_aborted(smem);
}
DEVICE void wait_for_tokens(const Params& p, Smem& smem) {
    if (warp_idx() == 0 && !all_tell(p, kWaitTokens, p.tokens_ready_at)) abort_head(smem);
    leave_if_aborted(smem);
}

// The expert, among those of all ranks, for an id of this rank's `token`: the id, or a replica in Params::expert_map.
// A rank's tokens take replicas by turns and each rank begins at another, so all get their share wherever tokens lie.
// Slots of a token take the same turn: experts that are laid out alike stay on one rank, which fetches the token and
// sums its rows once, and an id twice is one expert twice.
DEVICE u32 physical_expert(const Params& p, u64 id, u32 token) {
    if (p.expert_map == nullptr) return id < kNumAllExperts ? u32(id) : kUnused;
    if (id >= p.num_logical_experts) return kUnused;
    const u32* replicas = p.expert_map + id * p.max_replicas;
    u32 num = 0;
    while (num < p.max_replicas && replicas[num] < kNumAllExperts) ++num;
    return num == 0 ? kUnused : replicas[(p.rank + token) % num];
}

// Experts and router weights of this rank's pairs into the tables of all ranks.
DEVICE void publish_pairs(const Params& p, const Head& head) {
    const u32 num_pairs = p.rank_tokens * kTopK, num_own = p.num_own_tokens * kTopK;
    const u32 start = p.rank * num_pairs;
    if (block_idx() == 0 && thread_idx() < kNumRanks) bounds(p, thread_idx())[p.rank] = p.rank_tokens;
    for (u32 pair = block_idx() * kNumThreads + thread_idx(); pair < num_pairs; pair += num_blocks() * kNumThreads) {
        u32 expert = kUnused;
        float weight = 0.0f;
        if (pair < num_own) {
            expert = physical_expert(p, own_id(p, pair), pair / kTopK);
            weight = own_weight(p, pair);
        }
        for (u32 rank = 0; rank < kNumRanks; ++rank) {
            pair_experts(p, rank)[start + pair] = expert;
            pair_weights(p, rank)[start + pair] = weight;
        }
    }
    tell_ranks_when_all(p, head, kBankPublished, p.pairs_ready_at);
}

// A token's row and scales where ranks fetch them, on `rank`.
DEVICE u8* staged_row(const Params& p, u32 rank, u32 token) {
    return symmetric<u8>(p, rank, p.staged_x_at) + bank_start(p, 1, kRowBytes) + u64(token) * kRowBytes;
}
DEVICE float* staged_scales(const Params& p, u32 rank, u32 token) {
    return symmetric<float>(p, rank, p.staged_scale_at) + bank_start(p, 1, kXQuantScaleStride) +
           u64(token) * kXQuantScaleStride;
}

// This rank's tokens, quantised if weights are not bf16, where ranks fetch them: 512 bytes a warp at a time.
DEVICE void stage_tokens(const Params& p, const Head& head) {
    constexpr u32 kUnits = ceil_div(kRowBytes, 512);
    const u32 lane = lane_idx(), warps = kNumThreads / kWarpThreads;
    const u64 num_units = u64(p.num_own_tokens) * kUnits;
    for (u64 unit = u64(warp_idx()) * num_blocks() + block_idx(); unit < num_units; unit += warps * num_blocks()) {
        const u32 token = u32(unit / kUnits), at = u32(unit % kUnits) * 512 + lane * 16;
        const u8* row = p.x + i64(token) * p.x_stride;
        uint4 raw[2] = {};
        float scale = 0.0f;
        if (at < kRowBytes) {
            raw[0] = *reinterpret_cast<const uint4*>(row + (quantizes_x(p) ? 2 * at : at));
            if (quantizes_x(p)) raw[1] = *reinterpret_cast<const uint4*>(row + 2 * at + 16);
            if (kQuantizes && !p.x_is_bf16) {
                scale = p.x_scale[i64(token) * p.x_scale_token_stride + i64(at / 128) * p.x_scale_group_stride];
            }
        }
        if (quantizes_x(p)) {
            const Quantized q = quantize_16(raw);
            raw[0] = q.codes;
            scale = q.scale;
        }
        if (at >= kRowBytes) continue;
        *reinterpret_cast<uint4*>(staged_row(p, p.rank, token) + at) = raw[0];
        if (kQuantizes && lane % 8 == 0) staged_scales(p, p.rank, token)[at / 128] = scale;
    }
    tell_ranks_when_all(p, head, kBankStaged, p.tokens_ready_at);
}

// Of a token's row that a warp has in flight: 512 bytes each, up to 14, as many every time.
constexpr u32 kRowPieces = ceil_div(kRowBytes, 512);
constexpr u32 kFetchBatch = ceil_div(kRowPieces, ceil_div(kRowPieces, 14));

// One warp fetches a token of the batch. `store(at, pieces)` puts kFetchBatch pieces of 16 bytes, 512 bytes apart from
// `at` on and as far as the row goes, where they belong, `store_scale(group, scale)` the scale of 128 channels.
template <typename Store, typename StoreScale>
DEVICE void fetch_token(const Params& p, u32 token, Store store, StoreScale store_scale) {
    constexpr u32 kGroups = kQuantizes ? ceil_div(kHidden, 128) : 0, kLaneGroups = ceil_div(kGroups, kWarpThreads);
    const u32 rank = token / p.rank_tokens, of_rank = token % p.rank_tokens;
    const u8* row = staged_row(p, rank, of_rank);
    float scales[kLaneGroups + 1];
#pragma unroll
    for (u32 i = 0; i < kLaneGroups; ++i) {
        const u32 group = i * kWarpThreads + lane_idx();
        if (group < kGroups) scales[i] = staged_scales(p, rank, of_rank)[group];
    }
    for (u32 first = lane_idx() * 16; first < kRowBytes; first += kFetchBatch * 512) {
        uint4 pieces[kFetchBatch] = {};
#pragma unroll
        for (u32 i = 0; i < kFetchBatch; ++i) {
            const u32 at = first + i * 512;
            if (at < kRowBytes) pieces[i] = *reinterpret_cast<const uint4*>(row + at);
        }
        store(first, pieces);
    }
#pragma unroll
    for (u32 i = 0; i < kLaneGroups; ++i) {
        const u32 group = i * kWarpThreads + lane_idx();
        if (group < kGroups) store_scale(group, scales[i]);
    }
}

// The whole CTA: this rank's tokens and pairs to all, and the pairs of all. Pairs go first: weights wait for them.
DEVICE void bring_pairs(const Params& p, Smem& smem, const Head& head) {
    leave_if_aborted(smem);
    publish_pairs(p, head);
    stage_tokens(p, head);
    wait_for_pairs(p, smem);
}
