// What a token leaves at a rank: rows, their scales, and a record.

// Scales beside every row that the lanes of `targets` store. One whole warp.
constexpr u32 kLaneGroups = ceil_div(kNumGroups, kWarpThreads);
template <typename ScaleOf>
DEVICE void store_row_scales(const Params& p, uint2 place, u32 targets, ScaleOf scale_of) {
    float scales[kLaneGroups + 1];
#pragma unroll
    for (u32 i = 0; i < kLaneGroups; ++i) {
        const u32 group = i * kWarpThreads + lane_idx();
        if (group < kNumGroups) scales[i] = scale_of(group);
    }
    for (u32 left = targets; left != 0; left &= left - 1) {
        const u32 lane = __ffs(left) - 1;
        float* row =
            scales_on(p, __shfl_sync(kFullMask, rank_of_place(place), lane), __shfl_sync(kFullMask, place.y, lane));
#pragma unroll
        for (u32 i = 0; i < kLaneGroups; ++i) {
            const u32 group = i * kWarpThreads + lane_idx();
            if (group < kNumGroups) row[group] = scales[i];
        }
    }
}

// A token and where it is from; a lane has one of its slots: where that went, its expert there and router weight.
struct Sent {
    u32 token, source;
    uint2 place;
    u32 expert, weight;
};

// The token's record on each of its ranks, of which the lanes of `firsts` stand for one.
DEVICE void store_records(const Params& p, const Sent& sent, u32 firsts) {
    const u32 rank = sent.place.x == kNoPlace ? kUnused : rank_of_place(sent.place);
    u32 part = 0;
    for (u32 left = firsts; left != 0; left &= left - 1, ++part) {
        const u32 lane = __ffs(left) - 1, to = __shfl_sync(kFullMask, rank, lane);
        u32* words = record(p, to, __shfl_sync(kFullMask, token_of_place(sent.place), lane));
        const bool is_there = rank == to;
        if (lane_idx() == 0) words[kRecordToken] = sent.token;
        if (lane_idx() == 0) words[kRecordRank] = sent.source << kRecordPartBits | part;
        if (lane_idx() >= kTopK) continue;
        words[kRecordIds + lane_idx()] = is_there ? sent.expert : kUnused;
        words[kRecordWeights + lane_idx()] = is_there ? sent.weight : 0;
        if constexpr (kExpertRows) words[kRecordRows + lane_idx()] = is_there ? sent.place.y : kUnused;
    }
}

// Of this rank's own token.
DEVICE Sent sent_from_here(const Params& p, u32 token, uint2 place) {
    const u64 pair = u64(token) * kTopK + lane_idx();
    const bool used = place.x != kNoPlace;
    const u32 expert = used ? expert_of_pair(p, pair) - rank_of_place(place) * kNumExperts : kUnused;
    return {token, p.rank, place, expert, used ? __float_as_uint(own_weight(p, pair)) : 0};
}
