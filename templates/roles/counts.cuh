// Experts of pairs among those of all ranks, and where ranks tell each other how many they have.

// Or kUnused.
DEVICE u32 expert_of_pair(const Params& p, u64 pair) {
    const u64 id = own_id(p, pair) - p.first_expert;
    return id < kNumAllExperts ? u32(id) : kUnused;
}

// Counts of `rank`'s tokens as rank `on` was told them: pairs of every expert, then tokens of every rank.
DEVICE i64 counts_at(const Params& p, u32 rank) { return p.counts_at + i64(rank) * kCountWords * 4; }
DEVICE u32* counts_of(const Params& p, u32 on, u32 rank) { return symmetric<u32>(p, on, counts_at(p, rank)); }
