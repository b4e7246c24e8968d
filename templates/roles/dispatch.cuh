// The dispatch warps: a token each, from x through shared memory to all its rows. Rows go to a rank when all ranks have
// told their counts: then each has come so far in its stream that nobody reads the rows of the launch before.

using RowRing = Ring<kNumRowBuffers>;

DEVICE u8* row_buffer(Smem& smem, u32 warp, const RowRing& ring) { return smem.buffers[warp][ring.stage]; }

DEVICE void init_row_barriers(Smem& smem) {
    if (thread_idx() != 0) return;
    init_barrier(&smem.places_found[0], kNumNotifyWarps);  // a lane of each notify warp
    for (u32 warp = 0; warp < kNumDispatchWarps; ++warp) {
        for (u32 i = 0; i < kNumRowBuffers; ++i) init_barrier(&smem.landed[warp][i], 1);  // the warp's lane 0
    }
    fence_barrier_init();
}

// Starts a token's row on its way into a buffer that no store reads any more. One whole warp.
DEVICE void load_row(const Params& p, Smem& smem, u32 warp, u32 token, const RowRing& ring) {
    if (quantizes_x(p) || lane_idx() != 0) return;
    u64* landed = &smem.landed[warp][ring.stage];
    arrive_expect_bytes(landed, kRowBytes);
    load_bulk(row_buffer(smem, warp, ring), p.x + i64(token) * p.x_stride, kRowBytes, landed);
}

// Until the row is there; or quantises it there, and its scales into Smem::scales. One whole warp.
DEVICE void wait_for_row(const Params& p, Smem& smem, u32 warp, u32 token, const RowRing& ring) {
    if (!quantizes_x(p)) {
        wait_barrier(p, kWaitLanded, &smem.landed[warp][ring.stage], warp, ring.parity());
        return;
    }
    u8* row = row_buffer(smem, warp, ring);
    const u8* source = p.x + i64(token) * p.x_stride;
    constexpr u32 kBatch = min_of(ceil_div(kHidden, 512), 7u);  // loads of 1,024 bytes in flight
    for (u32 base = 0; base < kHidden; base += kBatch * 512) {  // all lanes: quantize_16 wants them
        const u32 first = base + lane_idx() * 16;
        uint4 raw[kBatch][2] = {};
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 channel = first + i * 512;
            if (channel >= kHidden) continue;
            raw[i][0] = *reinterpret_cast<const uint4*>(source + channel * 2);
            raw[i][1] = *reinterpret_cast<const uint4*>(source + channel * 2 + 16);
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 channel = first + i * 512;
            const Quantized q = quantize_16(raw[i]);
            if (channel >= kHidden) continue;
            *reinterpret_cast<uint4*>(row + channel) = q.codes;
            if (lane_idx() % 8 == 0) smem.scales[warp][channel / 128] = q.scale;
        }
    }
    fence_async_shared();
    sync_warp();
}

// Scales beside every row that the lanes of `targets` store.
constexpr u32 kLaneGroups = ceil_div(kNumGroups, kWarpThreads);
DEVICE void store_row_scales(const Params& p, Smem& smem, u32 warp, u32 token, uint2 place, u32 targets) {
    float scales[kLaneGroups + 1];
#pragma unroll
    for (u32 i = 0; i < kLaneGroups; ++i) {
        const u32 group = i * kWarpThreads + lane_idx();
        if (group >= kNumGroups) continue;
        scales[i] = p.x_is_bf16 ? smem.scales[warp][group]
                                : p.x_scale[i64(token) * p.x_scale_token_stride + i64(group) * p.x_scale_group_stride];
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
    sync_warp();  // the next token's scales may be written
}

// The token's record on each of its ranks, of which the lanes of `firsts` stand for one.
DEVICE void store_records(const Params& p, u32 token, uint2 place, u32 firsts) {
    const u64 pair = u64(token) * kTopK + lane_idx();
    const bool used = place.x != kNoPlace;
    const u32 rank = used ? rank_of_place(place) : kUnused;
    const u32 expert = used ? expert_of_pair(p, pair) - rank * kNumExperts : kUnused;
    const u32 weight = used ? __float_as_uint(own_weight(p, pair)) : 0;
    u32 part = 0;
    for (u32 left = firsts; left != 0; left &= left - 1, ++part) {
        const u32 lane = __ffs(left) - 1, to = __shfl_sync(kFullMask, rank, lane);
        u32* words = record(p, to, __shfl_sync(kFullMask, token_of_place(place), lane));
        const bool is_there = rank == to;
        if (lane_idx() == 0) words[kRecordToken] = token;
        if (lane_idx() == 0) words[kRecordRank] = p.rank << kRecordPartBits | part;
        if (lane_idx() >= kTopK) continue;
        words[kRecordIds + lane_idx()] = is_there ? expert : kUnused;
        words[kRecordWeights + lane_idx()] = is_there ? weight : 0;
        if constexpr (kExpertRows) words[kRecordRows + lane_idx()] = is_there ? place.y : kUnused;
    }
}

DEVICE void role_dispatch(const Params& p, Smem& smem, const Head&) {
    const Chunk chunk = chunk_of_block(p);
    const u32 warp = warp_idx() - kDispatchWarpBegin;
    RowRing ring, loading;
    u32 next = chunk.begin + warp;  // the token to be loaded
    for (u32 i = 0; i + 1 < kNumRowBuffers && next < chunk.end; ++i, next += kNumDispatchWarps, loading.advance()) {
        load_row(p, smem, warp, next, loading);
    }
    // Pairs with role_notify, whose waits have budgets: it always arrives. If it gave up, all leave; else rows may be
    // stored over.
    while (!try_wait(&smem.places_found[0], 0)) continue;
    if (smem.first[kFirstAborted] != 0) exit_thread();
    fence_async_global();
    for (u32 token = chunk.begin + warp; token < chunk.end; token += kNumDispatchWarps, ring.advance()) {
        wait_for_stores_read<0>();
        sync_warp();
        if (next < chunk.end) load_row(p, smem, warp, next, loading);
        next += kNumDispatchWarps;
        loading.advance();
        wait_for_row(p, smem, warp, token, ring);
        const uint2 place = load_place(p.places, token);
        const bool is_first = is_first_on_rank(place);
        const bool stores = kExpertRows ? place.x != kNoPlace : is_first;
        if (stores) store_bulk(row_on(p, rank_of_place(place), place.y), row_buffer(smem, warp, ring), kRowBytes);
        commit_stores();
        if constexpr (kNumGroups > 0) {
            store_row_scales(p, smem, warp, token, place, __ballot_sync(kFullMask, stores));
        }
        const u32 firsts = __ballot_sync(kFullMask, is_first);
        if (!p.is_cached) store_records(p, token, place, firsts);
    }
    wait_for_stores<0>();
}

// The whole CTA: when rows of all ranks are here, records become the caller's.
DEVICE void end_dispatch(const Params& p, Smem& smem, const Head& head) {
    tell_ranks_when_all(p, head, kBankStaged, p.rows_ready_at);
    wait_for_ranks(p, smem, kWaitRows, p.rows_ready_at);
    if (!p.is_cached) {
        const u32* from = record(p, p.rank, 0);
        const u64 end = u64(p.num_received[0]) * kRecordWords;
        for (u64 i = u64(block_idx()) * kNumThreads + thread_idx(); i < end; i += u64(num_blocks()) * kNumThreads) {
            p.own_records[i] = from[i];
        }
    }
    end_transfer(p, head);
}
