// Sums of rows, in the order of a token's slots: the same bits every time.

// A warp sums 2,048 bytes of a row at once: a lane four times 16 bytes, 512 bytes apart.
constexpr u32 kPieceBytes = 2048, kPieces = ceil_div(kRowOutBytes, kPieceBytes), kStrips = kPieceBytes / 512;
constexpr u32 kRowsAhead = 4;  // whose loads are in flight together

struct Piece {
    u32 at;  // bytes into a row
    float sums[kStrips][8] = {};

    // Zeros past the row's end.
    DEVICE void load(uint4 (&raw)[kStrips], const u8* row) const {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            raw[i] = make_uint4(0, 0, 0, 0);
            if (at + i * 512 < kRowOutBytes) raw[i] = *reinterpret_cast<const uint4*>(row + at + i * 512);
        }
    }

    DEVICE void add(const uint4 (&raw)[kStrips], float factor) {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                sums[i][2 * w] += bf16_low(words[w]) * factor;
                sums[i][2 * w + 1] += bf16_high(words[w]) * factor;
            }
        }
    }

    DEVICE void store(u8* row) const {
#pragma unroll
        for (u32 i = 0; i < kStrips; ++i) {
            if (at + i * 512 >= kRowOutBytes) continue;
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; ++w) words[w] = pack_bf16(sums[i][2 * w], sums[i][2 * w + 1]);
            *reinterpret_cast<uint4*>(row + at + i * 512) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

// Adds up rows of the slots in `used`, first to last. `row_of(slot)` and `factor_of(slot)` are asked by the whole warp.
template <typename RowOf, typename FactorOf>
DEVICE void add_rows(Piece& piece, u32 used, RowOf row_of, FactorOf factor_of) {
    while (used != 0) {
        uint4 raw[kRowsAhead][kStrips];
        float factors[kRowsAhead] = {};
#pragma unroll
        for (u32 i = 0; i < kRowsAhead; ++i) {
            if (used == 0) break;
            const u32 slot = __ffs(used) - 1;
            used &= used - 1;
            piece.load(raw[i], row_of(slot));
            factors[i] = factor_of(slot);
        }
#pragma unroll
        for (u32 i = 0; i < kRowsAhead; ++i) {
            if (factors[i] != 0.0f) piece.add(raw[i], factors[i]);
        }
    }
}

// Calls `work(row, piece)` for every piece of `num_rows` rows that is this warp's.
template <typename Work>
DEVICE void for_each_piece(u32 num_rows, Work work) {
    const u64 end = u64(num_rows) * kPieces, stride = u64(kNumThreads / kWarpThreads) * num_blocks();
    for (u64 unit = u64(warp_idx()) * num_blocks() + block_idx(); unit < end; unit += stride) {
        work(u32(unit / kPieces), Piece{u32(unit % kPieces) * kPieceBytes + lane_idx() * 16});
    }
}

// Where the sum of token `n` here goes: to the token's rank.
DEVICE u8* home_of(const Params& p, const u32* record) {
    const u32 rank = record[kRecordRank];
    const u32 part = rank & ((1u << kRecordPartBits) - 1);
    return sum_on(p, rank >> kRecordPartBits, record[kRecordToken], part);
}

// Layout "tokens": rows are sums already. One warp a row, all of its loads in flight together.
DEVICE void send_row(const Params& p, u32 n) {
    constexpr u32 kBatch = min_of(ceil_div(kRowOutBytes, 512), 14u);
    const u8* row = p.rows_out + i64(n) * p.rows_stride;
    u8* home = home_of(p, p.own_records + u64(n) * kRecordWords);
    for (u32 first = lane_idx() * 16; first < kRowOutBytes; first += kBatch * 512) {
        uint4 raw[kBatch] = {};
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 at = first + i * 512;
            if (at < kRowOutBytes) raw[i] = *reinterpret_cast<const uint4*>(row + at);
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 at = first + i * 512;
            if (at < kRowOutBytes) *reinterpret_cast<uint4*>(home + at) = raw[i];
        }
    }
}

// Layout "experts": a piece of the rows of token `n` here, as one.
DEVICE void send_sum(const Params& p, u32 n, Piece piece) {
    const u32* words = p.own_records + u64(n) * kRecordWords;
    const u32 slot = min_of(lane_idx(), kTopK - 1), row = words[kRecordRows + slot];
    const float weight = p.is_weighted ? __uint_as_float(words[kRecordWeights + slot]) : 1.0f;
    const u32 used = __ballot_sync(kFullMask, lane_idx() < kTopK && words[kRecordIds + slot] != kUnused);
    add_rows(
        piece, used, [&](u32 s) { return p.rows_out + i64(__shfl_sync(kFullMask, row, s)) * p.rows_stride; },
        [&](u32 s) { return __shfl_sync(kFullMask, weight, s); });
    piece.store(home_of(p, words));
}

// What a token's ranks sent, and biases, as y.
DEVICE void add_up(const Params& p, u32 token, Piece piece) {
    const u32 num_parts = __popc(__ballot_sync(kFullMask, is_first_on_rank(load_place(p.places, token))));
    add_rows(
        piece, num_parts == 32 ? kFullMask : (1u << num_parts) - 1,
        [&](u32 part) { return sum_on(p, p.rank, token, part); }, [](u32) { return 1.0f; });
    uint4 raw[kStrips];
    if (p.bias_0 != nullptr) {
        piece.load(raw, p.bias_0 + i64(token) * p.bias_0_stride);
        piece.add(raw, 1.0f);
    }
    if (p.bias_1 != nullptr) {
        piece.load(raw, p.bias_1 + i64(token) * p.bias_1_stride);
        piece.add(raw, 1.0f);
    }
    piece.store(p.y + i64(token) * p.y_stride);
}

DEVICE void role_reduce(const Params& p, Smem& smem, const Head& head) {
    // This rank reads no sums of the launch before any more: others may send.
    if (block_idx() == 0 && warp_idx() == 0) signal_ranks(p, p.sums_wanted_at + p.rank * 4);
    wait_for_ranks(p, smem, kWaitSumsWanted, p.sums_wanted_at);
    // Tokens lie in the order of their ranks: each rank begins with those of another, the next one's.
    const u32 num_tokens = p.num_received[0], first = num_tokens / kNumRanks * ((p.rank + 1) % kNumRanks);
    const auto token_at = [&](u32 i) { return i < num_tokens - first ? i + first : i + first - num_tokens; };
    if constexpr (kExpertRows) {
        for_each_piece(num_tokens, [&](u32 i, const Piece& piece) { send_sum(p, token_at(i), piece); });
    } else {
        const u32 stride = kNumThreads / kWarpThreads * num_blocks();
        for (u32 i = warp_idx() * num_blocks() + block_idx(); i < num_tokens; i += stride) send_row(p, token_at(i));
    }
    tell_ranks_when_all(p, head, kBankStaged, p.sums_ready_at);
    wait_for_ranks(p, smem, kWaitSums, p.sums_ready_at);
    for_each_piece(p.num_tokens, [&](u32 token, const Piece& piece) { add_up(p, token, piece); });
}
