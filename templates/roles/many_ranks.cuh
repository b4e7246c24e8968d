// Many ranks: each has the experts from rank * kNumExperts on, and the tokens of all ranks are one batch of
// kNumRanks * Params::rank_tokens rows, of which a rank leaves unused what it has no tokens for. A rank that is a
// launch ahead has seen flags of all ranks in the launch before, so all are through with the one before that: two
// banks, by the launch number, are enough, and no rank waits for others to end. Relies on symmetric.cuh.

constexpr u32 kRowBytes = kHidden * kElementBytes;

// Of a bank of as much for every token.
DEVICE u64 bank_start(const Params& p, u32 tokens, u32 for_token) {
    return u64(launch_number() % 2) * tokens * p.rank_capacity * for_token;
}

// Experts and router weights of all pairs, on `rank`.
DEVICE u32* pair_experts(const Params& p, u32 rank) {
    return symmetric<u32>(p, rank, p.pair_experts_at) + bank_start(p, kNumRanks, kTopK);
}
DEVICE float* pair_weights(const Params& p, u32 rank) {
    return symmetric<float>(p, rank, p.pair_weights_at) + bank_start(p, kNumRanks, kTopK);
}

DEVICE u32 expert_of_pair(const Params& p, u64 pair) { return expert_of_id(p, pair_experts(p, p.rank)[pair], 0); }

// The same, all loads in flight together.
DEVICE u16 load_expert(const Params& p, u32 pair) {
    return u16(expert_of_id(p, load_relaxed_gpu(pair_experts(p, p.rank) + pair), 0));
}

DEVICE float router_weight(const Params& p, u64 pair) { return pair_weights(p, p.rank)[pair]; }

// Where a pair's row lies on its token's rank: the rank, and its number there. Worked out once, not by dividing for
// every store: -0.8 % (8 ranks of 2,048 tokens of S1, H200, 2026-11-30).
constexpr u32 kHomeRows = 1u << 26;
DEVICE u32 home_of_pair(const Params& p, u32 pair) {
    const u32 num_pairs = p.rank_tokens * kTopK, rank = pair / num_pairs;
    return rank * kHomeRows + pair - rank * num_pairs;
}
DEVICE u16* row_at_home(const Params& p, u32 home) {
    return symmetric<u16>(p, home / kHomeRows, p.slots_at) + u64(home % kHomeRows) * kHidden;
}

// Whether a token's row travels as it is, where its slots `used` hold experts here.
DEVICE bool goes_alone(u32 used) { return !kPresum || __popc(used) == 1; }

// Where GEMM 2 leaves a pair's row, and where the sum of a token's rows here goes: to its first slot of this rank.
// `use` is its row_use.
DEVICE u16* slice_of_pair(const Params& p, u32 pair, u32 use) {
    if constexpr (!kPresum) return row_at_home(p, use);
    return goes_alone(use) ? row_at_home(p, home_of_pair(p, pair)) : p.slices + u64(pair) * kHidden;
}
DEVICE u16* sum_target(const Params& p, u32 token, u32 used) {
    return row_at_home(p, home_of_pair(p, token * kTopK + __ffs(used) - 1));
}
