// The notify warps of a dispatch: where every row goes. A CTA has tokens of its own, one after the other, and each of
// these warps a part of them. They count, all CTAs and then all ranks tell their counts, and what comes before says
// where a warp's rows begin: it numbers them in order, so that they lie the same every time. Relies on a file each of
// chunks and of tell.

constexpr u32 kNotifyThreads = kNumNotifyWarps * kWarpThreads;
constexpr u32 kNotifyBarrier = 1;
DEVICE void sync_notify() {
    sync_warp();  // the barrier wants whole warps, and loops before it let lanes go one by one
    sync_named(kNotifyBarrier, kNotifyThreads);
}

// A warp's part of the CTA's tokens.
DEVICE Chunk part_of_warp(const Chunk& chunk, u32 warp) {
    const u32 share = ceil_div(chunk.end - chunk.begin, kNumNotifyWarps);
    const u32 begin = min_of(chunk.begin + warp * share, chunk.end);
    return {begin, min_of(begin + share, chunk.end)};
}

// Counts of a part of the tokens, by their columns. One warp; a lane has a token.
DEVICE void count_pairs(const Params& p, u32* counts, const Chunk& part) {
    for (u32 token = part.begin + lane_idx(); token < part.end; token += kWarpThreads) {
        u64 ranks = 0;
#pragma unroll 8
        for (u32 slot = 0; slot < kTopK; ++slot) {
            const u32 expert = expert_of_pair(p, u64(token) * kTopK + slot);
            if (expert == kUnused) continue;
            fetch_add_shared(counts + expert, 1);
            const u64 rank = u64(1) << expert / kNumExperts;
            if ((ranks & rank) == 0) fetch_add_shared(counts + kNumAllExperts + expert / kNumExperts, 1);
            ranks |= rank;
        }
    }
}

// Lanes with the same column take its next numbers, in order. One whole warp; kUnused takes none.
DEVICE u32 take_numbers(u32* next, u32 column) {
    const bool used = column != kUnused;
    const u32 same = __match_any_sync(kFullMask, used ? column : kUnused - lane_idx());
    const u32 before = __popc(same & ((1u << lane_idx()) - 1));
    const u32 number = used ? next[column] + before : 0;
    sync_warp();
    if (used && before == 0) next[column] = number + __popc(same);
    sync_warp();
    return number;
}

// One warp: places of a part of the tokens, from the first of every column on.
DEVICE void number_pairs(const Params& p, u32* next, const Chunk& part) {
    constexpr u32 kTokens = kWarpThreads / kTopK;  // at a time
    const u32 lane = lane_idx(), of_step = lane / kTopK;
    const auto load = [&](u32 first) {
        const bool exists = of_step < kTokens && first + of_step < part.end;
        return exists ? expert_of_pair(p, u64(first + of_step) * kTopK + lane % kTopK) : kUnused;
    };
    u32 ahead = load(part.begin);
    for (u32 first = part.begin; first < part.end; first += kTokens) {
        const u32 expert = ahead, rank = expert / kNumExperts;
        ahead = load(first + kTokens);
        // The first slot of a token on a rank takes a number for it, the others the same.
        const u32 key = expert == kUnused ? kUnused - lane : of_step * kNumRanks + rank;
        const u32 leader = __ffs(__match_any_sync(kFullMask, key)) - 1;
        const bool leads = expert != kUnused && leader == lane;
        const u32 of_leader = take_numbers(next, leads ? kNumAllExperts + rank : kUnused);
        const u32 n = __shfl_sync(kFullMask, of_leader, leader);
        const u32 row = kExpertRows ? take_numbers(next, expert) : n;
        if (of_step >= kTokens || first + of_step >= part.end) continue;
        const u64 pair = u64(first + of_step) * kTopK + lane % kTopK;
        p.places[pair] = expert == kUnused ? make_uint2(kNoPlace, 0) : make_place(rank, n, row);
    }
}

// Counts of the CTAs before this one into `before`; the last CTA tells the ranks the totals.
DEVICE bool tell_counts(const Params& p, Smem& smem, const Head& head) {
    const u32 thread = thread_idx(), block = block_idx();
    u32* mine = p.block_counts + u64(block) * kNumColumns;
    for (u32 c = thread; c < kNumColumns; c += kNotifyThreads) {
        u32 count = 0;
        for (u32 warp = 0; warp < kNumNotifyWarps; ++warp) count += smem.counts[warp][c];
        mine[c] = count;
    }
    sync_notify();
    const bool in_time = warp_idx() != 0 || sync_grid(p, counter(p, head, kBankBarrier));
    if (!in_time) abort_head(smem);
    sync_notify();
    if (smem.first[kFirstAborted] != 0) return false;
    for (u32 c = thread; c < kNumColumns; c += kNotifyThreads) {
        u32 before = 0;
#pragma unroll 8
        for (u32 other = 0; other < block; ++other) before += p.block_counts[u64(other) * kNumColumns + c];
        smem.before[c] = before;
        if (block + 1 < num_blocks()) continue;
        tell_total(p, c, before + mine[c]);
    }
    sync_notify();
    if (block + 1 == num_blocks()) tell_ready(p, smem);
    return true;
}

// First rows of a rank's experts, by all ranks' `totals`: all warps, a rank each.
DEVICE void add_starts(const Params& p, Smem& smem, const u32* totals) {
    constexpr u32 kPart = ceil_div(kNumExperts, kWarpThreads);
    for (u32 rank = warp_idx(); rank < kNumRanks; rank += kNumNotifyWarps) {
        const u32 first = rank * kNumExperts;
        const u32 begin = min_of(lane_idx() * kPart, kNumExperts), end = min_of(begin + kPart, kNumExperts);
        u32 rows = 0;
        for (u32 e = begin; e < end; ++e) rows += ceil_div(totals[first + e], kAlignment) * kAlignment;
        u32 row = rows;
#pragma unroll
        for (u32 distance = 1; distance < kWarpThreads; distance *= 2) {
            const u32 lower = __shfl_up_sync(kFullMask, row, distance);
            row += lane_idx() >= distance ? lower : 0;
        }
        row -= rows;
        const bool tells = rank == p.rank && block_idx() == 0;
        for (u32 e = begin; e < end; ++e) {
            smem.before[first + e] += row;
            if (tells) p.expert_starts[e] = row;
            if (tells) p.expert_counts[e] = totals[first + e];
            row += ceil_div(totals[first + e], kAlignment) * kAlignment;
        }
        if (tells && lane_idx() == kWarpThreads - 1) p.expert_starts[kNumExperts] = row;
    }
}

// From what all ranks have told: the first place of each warp's rows of every expert, and of its tokens on every rank,
// in place of its counts.
DEVICE void find_first_places(const Params& p, Smem& smem) {
    for (u32 c = thread_idx(); c < kNumColumns; c += kNotifyThreads) {
        u32 total = 0, before = 0;
        for (u32 rank = 0; rank < kNumRanks; ++rank) {
            const u32 count = counts_of(p, p.rank, rank)[c];
            before += rank < p.rank ? count : 0;
            total += count;
        }
        smem.totals[c] = total;
        smem.before[c] += before;
    }
    sync_notify();
    add_starts(p, smem, smem.totals);
    sync_notify();
    for (u32 c = thread_idx(); c < kNumColumns; c += kNotifyThreads) {
        u32 first = smem.before[c];
        for (u32 warp = 0; warp < kNumNotifyWarps; ++warp) {
            const u32 count = smem.counts[warp][c];
            smem.counts[warp][c] = first;
            first += count;
        }
    }
    sync_notify();
}

// How many tokens and rows came to this rank. One thread, behind add_starts.
DEVICE void tell_host(const Params& p, const u32* totals) {
    const u32 tokens = totals[kNumAllExperts + p.rank];
    const u32 rows = kExpertRows ? p.expert_starts[kNumExperts] : tokens;
    p.num_received[0] = tokens;
    p.num_received[1] = rows;
    if (p.host_received == nullptr) return;
    store_relaxed_sys(p.host_received + 1, rows);
    store_release_sys(p.host_received, tokens + 1);
}

DEVICE void role_notify(const Params& p, Smem& smem, const Head& head) {
    const u32 warp = warp_idx();
    const Chunk chunk = chunk_of_block(p), part = part_of_warp(chunk, warp);
    // Else nothing is to be numbered here. Nor may the counts be read then: ranks of other nodes wait for what this CTA
    // sends before they tell those of the next launch.
    const bool numbers = chunk.begin < chunk.end || block_idx() == 0;
    u32* counts = smem.counts[warp];
    bool goes_on = true;
    if (!p.is_cached) {
        for (u32 c = lane_idx(); c < kNumColumns; c += kWarpThreads) counts[c] = 0;
        sync_warp();
        count_pairs(p, counts, part);
        sync_notify();
        goes_on = tell_counts(p, smem, head);
    } else if (block_idx() + 1 == num_blocks()) {
        tell_ready(p, smem);  // no counts: this launch may be written to
    }
    if (goes_on) {
        if (warp == 0 && !counts_came(p)) abort_head(smem);
        sync_notify();
        if (numbers && !p.is_cached && smem.first[kFirstAborted] == 0) {
            find_first_places(p, smem);
            if (block_idx() == 0 && thread_idx() == 0) tell_host(p, smem.totals);
            if (block_idx() == 0 && warp == 1) note_sources(p);
            number_pairs(p, counts, part);
        }
    }
    sync_warp();
    if (lane_idx() == 0) arrive(&smem.places_found[0]);  // pairs with role_dispatch
    if (smem.first[kFirstAborted] != 0) exit_thread();
}
