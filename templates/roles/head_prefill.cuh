// The head of a prefill launch: every CTA sorts the pairs of its share of the tokens, and copies each of these tokens
// once to all of its rows in Params::pool, quantising bf16 on the way for FP8 weights. TMA then reads tiles of the
// pool.

constexpr u32 kNoRow = ~0u;
constexpr u32 kNumWarps = kNumThreads / kWarpThreads;
constexpr u32 kTokenScales = kQuantizes ? ceil_div(kHidden, 128) : 0;
constexpr u32 kScalePitch = kTokenScales | 1;  // tokens begin in different banks of shared memory

// Tokens of a CTA at a time: as many as have room for their rows and scales.
constexpr u32 kChunkTokens = min_of(
    4096 / kTopK, u32(sizeof(Smem::token_tiles) - 2 * kNumExperts * sizeof(u32)) / (kTopK * 4 + kScalePitch * 4));
struct Sorting {
    u32 begin[kNumExperts], next[kNumExperts];  // rows of an expert that the chunk's tokens have
    u32 rows[kChunkTokens * kTopK];
    float scales[kChunkTokens * kScalePitch];
};
static_assert(kChunkTokens > 0 && sizeof(Sorting) <= sizeof(Smem::token_tiles), "sorting aliases the token ring");

// What the schedule warp must know of a row: its pair and what row_use says of that, which takes it many loads.
DEVICE void store_row(const Params& p, u32 row, u32 pair) {
    *reinterpret_cast<uint2*>(p.row_pairs + 2 * row) = make_uint2(pair, row_use(p, pair));
}
DEVICE u32 stored_pair(const Params& p, u32 row) { return p.row_pairs[2 * row]; }

// One warp, from the token's rank, unless no expert here wants it.
DEVICE void fetch_to_rows(const Params& p, u32 token, const u32* rows, float* scales) {
    if (__ballot_sync(kFullMask, lane_idx() < kTopK && rows[lane_idx() % kTopK] != kNoRow) == 0) return;
    constexpr u32 kRowBytes = kHidden * kElementBytes;
    fetch_token(
        p, token,
        [&](u32 first, const uint4(&pieces)[kFetchBatch]) {
            for (u32 slot = 0; slot < kTopK; ++slot) {
                if (rows[slot] == kNoRow) continue;
                u8* row = p.pool + u64(rows[slot]) * kRowBytes;
#pragma unroll
                for (u32 i = 0; i < kFetchBatch; ++i) {
                    const u32 at = first + i * 512;
                    if (at < kRowBytes) *reinterpret_cast<uint4*>(row + at) = pieces[i];
                }
            }
        },
        [&](u32 group, float scale) { scales[group] = scale; });
}

// One warp, as it is. `rows` are the rows of the token's slots.
DEVICE void copy_bytes(const Params& p, u32 token, const u32* rows) {
    constexpr u32 kBatch = 8, kRowBytes = kHidden * kElementBytes;  // loads of 512 bytes in flight
    for (u32 first = lane_idx() * 16; first < kRowBytes; first += kBatch * 512) {
        uint4 raw[kBatch] = {};
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 at = first + i * 512;
            if (at < kRowBytes) raw[i] = *reinterpret_cast<const uint4*>(p.x + i64(token) * p.x_stride + at);
        }
        for (u32 slot = 0; slot < kTopK; ++slot) {
            if (rows[slot] == kNoRow) continue;
            u8* row = p.pool + u64(rows[slot]) * kRowBytes;
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const u32 at = first + i * 512;
                if (at < kRowBytes) *reinterpret_cast<uint4*>(row + at) = raw[i];
            }
        }
    }
}

// One warp, in FP8.
DEVICE void copy_token(const Params& p, u32 token, const u32* rows, float* scales) {
    constexpr u32 kBatch = 4;  // loads of 512 channels in flight
    const u32 lane = lane_idx();
    for (u32 first = 0; first < kHidden; first += kBatch * 512) {
        uint4 raw[kBatch][2] = {};
        float scale[kBatch] = {};
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 channel = first + i * 512 + lane * 16;
            if (channel >= kHidden) continue;
            if (p.x_is_bf16) {
                const uint4* source = reinterpret_cast<const uint4*>(p.x + i64(token) * p.x_stride + channel * 2);
                raw[i][0] = source[0];
                raw[i][1] = source[1];
            } else {
                raw[i][0] = *reinterpret_cast<const uint4*>(p.x + i64(token) * p.x_stride + channel);
                const i64 group = channel / 128;
                scale[i] = p.x_scale[i64(token) * p.x_scale_token_stride + group * p.x_scale_group_stride];
            }
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 channel = first + i * 512 + lane * 16;
            Quantized q{raw[i][0], scale[i]};
            if (p.x_is_bf16) q = quantize_16(raw[i]);
            if (channel >= kHidden) continue;
            for (u32 slot = 0; slot < kTopK; ++slot) {
                const u32 row = rows[slot];
                if (row != kNoRow) *reinterpret_cast<uint4*>(p.pool + u64(row) * kHidden + channel) = q.codes;
            }
            if (lane % 8 == 0) scales[channel / 128] = q.scale;
        }
    }
}

// Scales of the chunk's rows to their places, by 8 lanes an expert: one request to memory brings up to 8 rows'. A store
// for each row was as many requests again as the rows' channels: S1 2048 / 8192 / 16,384 -0.7 / -2.2 / -3.0 % (H200,
// 2026-11-30).
DEVICE void store_scales(const Params& p, const Sorting& sorting, u32 first) {
    for (u32 e = thread_idx() / 8; e < kNumExperts; e += kNumThreads / 8) {
        for (u32 row = sorting.begin[e] + thread_idx() % 8; row < sorting.next[e]; row += 8) {
            const float* scales = sorting.scales + (stored_pair(p, row) / kTopK - first) * kScalePitch;
#pragma unroll 8
            for (u32 group = 0; group < kTokenScales; ++group) {
                p.pool_scale[u64(group) * p.row_capacity + row] = scales[group];
            }
        }
    }
}

DEVICE Head run_head(const Params& p, Smem& smem) {
    wait_for_previous_launch();
    publish_first(p, smem, begin_head(p));
    sync_block();
    const Head head{smem.first[kFirstParity]};
    clear_other_bank(p, head.parity);
    bring_pairs(p, smem, head);
    Sorting& sorting = *reinterpret_cast<Sorting*>(smem.token_tiles);
    const u32 share = ceil_div(p.num_tokens, num_blocks());
    const u32 begin = min_of(share * block_idx(), p.num_tokens), end = min_of(begin + share, p.num_tokens);
    reserve_rows(p, smem, head, begin * kTopK, end * kTopK, sorting.begin, sorting.next);
    wait_for_tokens(p, smem);
    for (u32 first = begin; first < end; first += kChunkTokens) {
        const u32 last = min_of(first + kChunkTokens, end);
        for (u32 e = thread_idx(); e < kNumExperts; e += kNumThreads) sorting.begin[e] = sorting.next[e];
        sync_block();
        for (u32 pair = first * kTopK + thread_idx(); pair < last * kTopK; pair += kNumThreads) {
            const u32 expert = expert_of_pair(p, pair);
            const u32 row = expert < kNumExperts ? fetch_add_shared(sorting.next + expert, 1) : kNoRow;
            sorting.rows[pair - first * kTopK] = row;
            if (row != kNoRow) store_row(p, row, pair);
        }
        sync_block();
        for (u32 token = first + warp_idx(); token < last; token += kNumWarps) {
            const u32* rows = sorting.rows + (token - first) * kTopK;
            float* scales = sorting.scales + (token - first) * kScalePitch;
            if constexpr (kNumRanks > 1) {
                fetch_to_rows(p, token, rows, scales);
            } else if constexpr (kQuantizes) {
                copy_token(p, token, rows, scales);
            } else {
                copy_bytes(p, token, rows);
            }
        }
        sync_block();
        if constexpr (kQuantizes) store_scales(p, sorting, first);
        sync_block();
    }
    fence_async_shared();  // TMA writes the ring, which `sorting` aliases; role_feed has the fence for the pool
    if (thread_idx() == 0) end_head(p, head);
    return head;
}

DEVICE u32 pair_of_row(const Params& p, const Smem&, const Head&, u32 row) { return stored_pair(p, row); }
DEVICE u32 use_of_row(const Params& p, u32 row, u32) { return p.row_pairs[2 * row + 1]; }
