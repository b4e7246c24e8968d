// Every warp of a combine inside one domain: rows, or the sum of them here, go to the token's rank; then what came home
// is added up.

constexpr u32 kRowsAhead = 4;  // whose loads are in flight together

// Adds up rows of the slots in `used`, first to last; loads of kRowsAhead are in flight together. `row_of(slot)` and
// `factor_of(slot)` are asked by the whole warp.
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
            piece.load(raw[i], row_of(slot) + piece.at);
            factors[i] = factor_of(slot);
        }
#pragma unroll
        for (u32 i = 0; i < kRowsAhead; ++i) {
            if (factors[i] != 0.0f) piece.add(raw[i], factors[i]);
        }
    }
}

// Layout "experts": a piece of the rows of token `n` here, as one. One whole warp.
DEVICE void add_expert_rows(const Params& p, u32 n, Piece& piece) {
    const u32* words = p.own_records + u64(n) * kRecordWords;
    const u32 slot = min_of(lane_idx(), kTopK - 1), row = words[kRecordRows + slot];
    const float weight = p.is_weighted ? __uint_as_float(words[kRecordWeights + slot]) : 1.0f;
    const u32 used = __ballot_sync(kFullMask, lane_idx() < kTopK && words[kRecordIds + slot] != kUnused);
    add_rows(
        piece, used, [&](u32 s) { return p.rows_out + i64(__shfl_sync(kFullMask, row, s)) * p.rows_stride; },
        [&](u32 s) { return __shfl_sync(kFullMask, weight, s); });
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

DEVICE void role_reduce(const Params& p, Smem& smem, const Head& head) {
    // This rank reads no sums of the launch before any more: others may send.
    if (block_idx() == 0 && warp_idx() == 0) signal_ranks(p, p.sums_wanted_at + p.rank * 4);
    wait_for_ranks(p, smem, kWaitSumsWanted, p.sums_wanted_at);
    // Tokens lie in the order of their ranks: each rank begins with those of another, the next one's.
    const u32 num_tokens = p.num_received[0], first = num_tokens / kNumRanks * ((p.rank + 1) % kNumRanks);
    const auto token_at = [&](u32 i) { return i < num_tokens - first ? i + first : i + first - num_tokens; };
    if constexpr (kExpertRows) {
        for_each_piece(num_tokens, [&](u32 i, Piece piece) {
            const u32 n = token_at(i);
            add_expert_rows(p, n, piece);
            piece.store(home_of(p, p.own_records + u64(n) * kRecordWords));
        });
    } else {
        const u32 stride = kNumThreads / kWarpThreads * num_blocks();
        for (u32 i = warp_idx() * num_blocks() + block_idx(); i < num_tokens; i += stride) send_row(p, token_at(i));
    }
    tell_ranks_when_all(p, head, kBankStaged, p.sums_ready_at);
    wait_for_ranks(p, smem, kWaitSums, p.sums_ready_at);
    for_each_piece(p.num_tokens, [&](u32 token, Piece piece) {
        const u32 ranks = __ballot_sync(kFullMask, is_first_on_rank(load_place(p.places, token)));
        const auto sum = [&](u32 part) { return sum_on(p, p.rank, token, part); };
        add_rows(piece, first_rows(__popc(ranks)), sum, [](u32) { return 1.0f; });
        piece.store_y(p, token);
    });
}
