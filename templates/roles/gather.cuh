// Token rows and scales of a decode launch into the ring. Rows are gathered where they lie (x, its quantised copy, or
// the activations between the GEMMs) by cp.async with the swizzle applied by hand: no pool, no copy. The copies
// themselves arrive at the stage's barrier when they have landed, so these warps wait for nothing but free stages.

constexpr u32 kGatherThreads = kNumGatherWarps * kWarpThreads;
constexpr u32 kFeedArrivals = kGatherThreads;  // at a full stage
// Of a row in a k-block that it ends inside of.
constexpr u32 kXTailBytes = kHidden * kElementBytes % kTokenKBytes;
constexpr u32 kMidTailBytes = kMidStride * kElementBytes % kTokenKBytes;

// What this lane copies of every k-block of a task, with all that does not depend on k worked out: kOrderedBytes of
// each of kRows rows, the scales of kScales tokens, and one of the tile's weight scales. Offsets of the rows, in
// 16-byte units, are in Smem::row_offsets, a lane's together: sixteen registers would be too many beside the math
// warps' 224.
constexpr u32 kLanesARow = kTokenKBytes / kOrderedBytes;

struct Copies {
    static constexpr u32 kRowsApart = kGatherThreads / kLanesARow;
    static constexpr u32 kRows = kBlockTokens / kRowsApart;
    static constexpr u32 kScales = kBlockTokens / kGatherThreads;
    const u8* rows;
    u32 num_rows;                  // of this lane that exist
    u32 target;                    // of the first chunk in a stage's tile; rows lie kRowsApart apart, chunks by XOR
    const float* scales[kScales];  // null where the token does not exist
    u32 scale_group_stride;
    const float* weight_scale;
    u32 ragged_k, tail_bytes;  // the k-block that the row ends inside of
    u32 last_group;            // of a token's scales
};

DEVICE Copies find_copies(const Params& p, Smem& smem, const Task& task, u32 slot) {
    const u32 warp = warp_idx() - kGatherWarpBegin, lane = lane_idx();
    const bool gemm_2 = task.phase == kGemm2;
    Copies c;
    i64 row_stride, scale_row_stride;
    const float* scales;
    c.tail_bytes = gemm_2 ? kMidTailBytes : kXTailBytes;
    c.ragged_k = c.tail_bytes == 0 ? ~0u : (gemm_2 ? kNumKBlocks2 : kNumKBlocks1) - 1;
    c.last_group = (gemm_2 ? kNumGroups2 : kNumGroups1) - 1;
    if (gemm_2) {
        c.rows = p.mid + u64(task.row_start) * (kMidStride * kElementBytes);
        row_stride = kMidStride * kElementBytes;
        scales = p.mid_scale + task.row_start;
        scale_row_stride = 1;
        c.scale_group_stride = p.row_capacity;
    } else {
        c.rows = copies_x(p) ? p.pool : p.x;
        row_stride = copies_x(p) ? kHidden * kElementBytes : p.x_stride;
        const bool pooled = kNumRanks > 1 || quantizes_x(p);
        scales = pooled ? p.pool_scale : p.x_scale;
        scale_row_stride = pooled ? kXQuantScaleStride : p.x_scale_token_stride;
        c.scale_group_stride = pooled ? 1 : u32(p.x_scale_group_stride);
    }
    if constexpr (kHasBlockScales) c.weight_scale = weight_scale(p, task, min_of(lane, 2u));
    // Row i of the task: its token in x for GEMM 1, consecutive rows of mid for GEMM 2.
    const auto source_row = [&](u32 i) { return gemm_2 ? i : smem.task_rows[slot][i] / kTopK; };
    const u32 first_row = (warp * kWarpThreads + lane) / kLanesARow, piece = lane % kLanesARow;
    const u32 in_row = piece * kOrderedBytes;  // 128 bytes of all rows, then the next
    c.rows += in_row;
    c.target =
        in_row / kBlockKBytes * (kTileTokens * kBlockKBytes) + swizzle_128(first_row, in_row % kBlockKBytes / 16);
    c.num_rows = task.num_rows > first_row ? ceil_div(task.num_rows - first_row, Copies::kRowsApart) : 0;
    sync_warp();  // all lanes are done with the offsets of the task before
    for (u32 i = piece; i < c.num_rows; i += kLanesARow) {
        const u32 row = first_row + i * Copies::kRowsApart;
        smem.row_offsets[first_row][i] = u32(u64(source_row(row)) * row_stride / 16);
    }
    sync_warp();
    if constexpr (!kQuantizes) return c;
#pragma unroll
    for (u32 i = 0; i < Copies::kScales; ++i) {
        const u32 token = i * kGatherThreads + warp * kWarpThreads + lane;
        c.scales[i] = token < task.num_rows ? scales + i64(source_row(token)) * scale_row_stride : nullptr;
    }
    return c;
}

// Start the copies of k-block k.
DEVICE void copy_k_block(Smem& smem, const Copies& c, u32 stage, u32 k) {
    const u32 warp = warp_idx() - kGatherWarpBegin, lane = lane_idx();
    const u32 first_row = (warp * kWarpThreads + lane) / kLanesARow, in_row = lane % kLanesARow * kOrderedBytes;
    u8* tile = smem.token_tiles[stage];
    const u8* column = c.rows + k * kTokenKBytes;
    if constexpr (kXTailBytes + kMidTailBytes != 0) {
        // What lies past the end meets zeros, which TMA fills weights up with: any channels of the row will do.
        if (k == c.ragged_k && in_row >= c.tail_bytes) column = c.rows - in_row;
    }
    const uint4* offsets = reinterpret_cast<const uint4*>(smem.row_offsets[first_row]);
#pragma unroll
    for (u32 first = 0; first < Copies::kRows; first += 4) {
        if (first >= c.num_rows) break;
        const uint4 four = offsets[first / 4];
        const u32 ahead[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = first + i;
            if (row >= c.num_rows) continue;
            u8* target = tile + row * Copies::kRowsApart * kBlockKBytes;
#pragma unroll
            for (u32 at = 0; at < kOrderedBytes; at += 16) {
                copy_16_async(target + (c.target ^ at), column + u64(ahead[i]) * 16 + at);
            }
        }
    }
    if constexpr (kQuantizes) {
        float* scale = smem.token_scales[stage] + warp * kWarpThreads + lane;
#pragma unroll
        for (u32 g = 0; g < kTokenGroups; ++g, scale += kTileTokens) {
            const u64 group = u64(min_of(k * kTokenGroups + g, c.last_group)) * c.scale_group_stride;
#pragma unroll
            for (u32 i = 0; i < Copies::kScales; ++i) {
                if (c.scales[i] != nullptr) copy_4_async(scale + i * kGatherThreads, c.scales[i] + group);
            }
        }
        if (kHasBlockScales && warp == 0 && lane < 3)
            copy_4_async(&smem.weight_scales[stage][lane], c.weight_scale + k);
    }
}

// Copies of k-blocks that may be under way before the oldest is looked at.
constexpr u32 kCopiesAhead = min_of(kNumStages - 2, 3u);

// Tokens that are not in the order of channel_order.cuh: the oldest k-block's are put into it as soon as they are here.
// The lanes that copied them do it, so they wait for nobody.
DEVICE void order_k_block(Smem& smem, const Copies& c, Ring<kNumStages>& oldest) {
    u8* tile = smem.token_tiles[oldest.stage];
    for (u32 row = 0; row < c.num_rows; ++row) order_channels(tile + row * Copies::kRowsApart * kBlockKBytes, c.target);
    arrive(&smem.full[oldest.stage]);  // pairs with role_math: accumulate
    oldest.advance();
}

DEVICE void role_gather(const Params& p, Smem& smem, const Head& head) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumStages> ring;
    if (copies_x(p)) wait_for_head(p, head);
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        if (task.phase == kDone) return;
        trace_task(p, task);
        if (task.phase == kGemm2) wait_for_mid(p, head, task.block);
        const Copies copies = find_copies(p, smem, task, slot.stage);
        const bool orders = kHasChunkScales && task.phase == kGemm1 && !copies_x(p);
        Ring<kNumStages> oldest = ring;
        u32 k = task.k_begin;
        for (; k < task.k_end; ++k, ring.advance()) {
            wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
            copy_k_block(smem, copies, ring.stage, k);
            if (!orders) {
                arrive_after_copies(&smem.full[ring.stage]);  // pairs with role_math: multiply
                continue;
            }
            commit_copies();
            if (k - task.k_begin < kCopiesAhead) continue;
            wait_for_copy_groups<kCopiesAhead>();
            order_k_block(smem, copies, oldest);
        }
        if (orders) {
            wait_for_copies();
            for (u32 i = min_of(task.k_end - task.k_begin, kCopiesAhead); i > 0; --i)
                order_k_block(smem, copies, oldest);
        }
        trace_end(p, kEventTask);
        free_task(smem, slot);
    }
}
