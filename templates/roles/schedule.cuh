// Tasks: which tile next. The schedule warp claims them in one global order, publishes them with the pairs of their
// rows, and the other roles of the CTA follow. All tiles of GEMM 1 come before all of GEMM 2, so every wait points
// backwards in the order and the earliest unfinished task can always proceed.

enum Phase : u32 { kGemm1 = 0, kGemm2 = 1, kDone = 2 };

struct Task {
    u32 phase, expert, tile, row_start, num_rows, block;
    u32 k_begin, k_end;  // k-blocks
};

// Arrivals that free a task slot: the load lane; the feed lane or the gather warps; the deliver, expand and math warps.
constexpr u32 kTaskConsumers = 1 + (kSplitTokens ? 1 : kNumGatherWarps * kWarpThreads) +
                               (kDeliverWarpEnd - kDeliverWarpBegin + kNumExpandWarps + kNumMathWarps) * kWarpThreads;

// Blocks of one expert that are walked together for each weight tile: their tokens stay in L2 while every weight tile
// is read once. 16 x 128 tokens of hidden 7168 are 15 MB. Guess. Ranks of one launch share the L2: of 8 with S1's
// sizes, 4 and 8 blocks beat 4 and 4 by 0.5 % and 16 and 16 by 5 % (H200, 2026-11-30).
DEVICE u32 unit_size(u32 phase) { return min_of(16u, ceil_div(phase == kGemm1 ? 32 : 64, LOCAL_RANKS)); }

// Decode: where a GEMM has so few tiles that CTAs would have nothing to do, its tiles are tasks in parts along k. Sums
// of parts are rounded otherwise than one sum, and nothing else that rounds depends on the batch.
DEVICE u32 num_parts(const Smem& smem, u32 phase) {
    // k-blocks of a part, 1,024 channels: joining takes as long as several. Instead of 2,048, 1 token of S2 19.3
    // to 18.0 us, in MXFP4 22.5 to 21.0 (H200, 2026-12-01 and 2026-11-30).
    constexpr u32 kLeast = 1024 * kElementBytes / kTokenKBytes;
    const u32 num_tiles = smem.block_start[kNumExperts] * (phase == kGemm1 ? kNumTiles1 : kNumTiles2);
    const u32 most = (phase == kGemm1 ? kNumKBlocks1 : kNumKBlocks2) / kLeast;
    if (kSplitTokens || kBatchInvariant || 2 * num_tiles > num_blocks() || num_tiles == 0 || most == 0) return 1;
    return min_of(num_blocks() / num_tiles, most);
}

DEVICE bool is_in_parts(const Task& task) {
    return task.k_end - task.k_begin < (task.phase == kGemm1 ? kNumKBlocks1 : kNumKBlocks2);
}

DEVICE u32 num_tasks(const Smem& smem, u32 phase) {
    return smem.block_start[kNumExperts] * (phase == kGemm1 ? kNumTiles1 : kNumTiles2) * num_parts(smem, phase);
}

DEVICE Task decode_task(const Smem& smem, u32 index) {
    const u32 num_tasks_1 = num_tasks(smem, kGemm1);
    const u32 phase = index < num_tasks_1 ? kGemm1 : kGemm2;
    const u32 k = phase == kGemm1 ? kNumKBlocks1 : kNumKBlocks2;
    const u32 tiles = phase == kGemm1 ? kNumTiles1 : kNumTiles2;
    if (phase == kGemm2) index -= num_tasks_1;
    const u32 parts = num_parts(smem, phase), part = index % parts;
    index /= parts;
    // The expert e with block_start[e] * tiles <= index < block_start[e + 1] * tiles.
    u32 low = 0, high = kNumExperts;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (smem.block_start[middle] * tiles <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const u32 first = smem.block_start[low];
    index -= first * tiles;
    const u32 size = unit_size(phase), unit = index / (size * tiles) * size;
    const u32 unit_blocks = min_of(size, smem.block_start[low + 1] - first - unit);
    index -= unit * tiles;
    const u32 block = unit + index % unit_blocks;
    const u32 row_start = smem.row_start[low] + block * kBlockTokens;
    const u32 rest = smem.row_end[low] - row_start;
    const u32 num_rows = rest > kTileTokens ? kBlockTokens : rest;
    return {phase,    low,           index / unit_blocks, row_start,
            num_rows, first + block, k * part / parts,    k * (part + 1) / parts};
}

DEVICE void trace_task(const Params& p, const Task& task) {
    trace_begin(p, kEventTask, task.phase << 31 | task.expert << 16 | task.tile, task.block);
}

// Tokens without any expert get a zero row: no tile reaches them. One warp of every CTA.
DEVICE void clear_unrouted_tokens(const Params& p) {
    const u32 stride = num_blocks() * kWarpThreads;
    for (u32 first = block_idx() * kWarpThreads; first < p.num_tokens; first += stride) {
        const u32 mine = first + lane_idx();
        u32 unrouted = __ballot_sync(kFullMask, mine < p.num_tokens && used_slots(p, mine) == 0);
        for (; unrouted != 0; unrouted &= unrouted - 1) {
            u16* row = p.y + i64(first + __ffs(unrouted) - 1) * p.y_stride;
            for (u32 channel = lane_idx() * 8; channel < kHidden; channel += kWarpThreads * 8) {
                *reinterpret_cast<uint4*>(row + channel) = make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// Routed pairs of each expert, added to what the caller has. One warp of one CTA.
DEVICE void add_expert_counts(const Params& p, const Smem& smem) {
    if (p.expert_counts == nullptr || block_idx() != 0) return;
    for (u32 e = lane_idx(); e < kNumExperts; e += kWarpThreads) {
        fetch_add_relaxed_gpu(p.expert_counts + e, smem.row_end[e] - smem.row_start[e]);
    }
}

// The next task is claimed when so many k-blocks of this one are yet to be loaded: in time for its own.
constexpr u32 kClaimAhead = kNumLoadStages + 3;

// A task with fewer is over before the next has come: the one after it is claimed already. Not towards the end, where
// tasks that wait here are missing where CTAs have nothing to do.
DEVICE bool claims_two(const Task& task, u32 index, u32 end) {
    return task.k_end - task.k_begin < kClaimAhead && index + 2 * num_blocks() < end;
}

// Decode, few tasks: beside one of GEMM 2 that waits for GEMM 1 no other is claimed, though it is so short that load
// asks for more before any of it is multiplied. CTAs that are through with GEMM 1 claim meanwhile, else one would be
// left with two tasks where others have none. W4A8, 1 token: S4 38.9 to 31.4 us, S2 19.8 to 19.1 (H200, 2026-12-01).
DEVICE bool holds_back(const Task& task, u32 end) {
    constexpr bool kIsShort = kNumKBlocks2 < kClaimAhead + kNumLoadStages;
    return !kSplitTokens && kIsShort && task.phase == kGemm2 && end < 2 * num_blocks();
}

// Until every tile of GEMM 1 has brought its channels to the block's rows of Params::mid. Pairs with
// role_deliver.
DEVICE void wait_for_mid(const Params& p, const Head& head, u32 block) {
    wait_until(p, kWaitMid, block, kNumTiles1,
               [&] { return load_acquire_gpu(counter(p, head, kBankBlocks + block)) == kNumTiles1; });
}

// One warp. Loads of all rows are in flight together: a load takes a microsecond beside the stream of tiles, and a tile
// of GEMM 2 may take eight.
DEVICE void publish_rows(const Params& p, Smem& smem, const Head& head, const Task& task, u32 slot) {
    constexpr u32 kLooks = ceil_div(kTileTokens, kWarpThreads);
    u32 pairs[kLooks], uses[kLooks];
#pragma unroll
    for (u32 i = 0; i < kLooks; ++i) {
        const u32 row = i * kWarpThreads + lane_idx();
        if (row >= task.num_rows) continue;
        pairs[i] = pair_of_row(p, smem, head, task.row_start + row);
        if (task.phase == kGemm2) uses[i] = use_of_row(p, task.row_start + row, pairs[i]);
    }
#pragma unroll
    for (u32 i = 0; i < kLooks; ++i) {
        const u32 row = i * kWarpThreads + lane_idx();
        if (row >= task.num_rows) continue;
        smem.task_rows[slot][row] = pairs[i];
        if (task.phase == kGemm2) smem.task_used[slot][row] = uses[i];
    }
}

// One lane.
DEVICE void write_task(Smem& smem, u32 slot, const Task& task) {
    u32* words = smem.tasks[slot];
    words[0] = task.phase;
    words[1] = task.expert;
    words[2] = task.tile;
    words[3] = task.row_start;
    words[4] = task.num_rows;
    words[5] = task.block;
    words[6] = task.k_begin;
    words[7] = task.k_end;
}

DEVICE Task read_task(const Smem& smem, u32 slot) {
    const u32* words = smem.tasks[slot];
    return {words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]};
}

// Every lane of the schedule warp, for what it wrote; pairs with next_task.
DEVICE void publish_task(Smem& smem, u32 slot) { arrive(&smem.task_full[slot]); }

DEVICE void role_schedule(const Params& p, Smem& smem, const Head& head) {
    const u32 lane = lane_idx();
    Task task{kDone};
    bool is_written = smem.first[kFirstPreloaded] != 0;  // by the head: see write_first_rows
    if (is_written) {
        task = read_task(smem, 0);
        publish_task(smem, 0);
        trace_task(p, task);
    }
    const u32 num_tasks_1 = num_tasks(smem, kGemm1), end = num_tasks_1 + num_tasks(smem, kGemm2);
    if (!head.local) wait_for_head(p, head);
    Ring<kNumTaskSlots> slot;
    Ring<kNumTaskSlots> wanted;  // the task that load must be near the end of
    u32 orphan = 0;              // first tasks are looked through up to this CTA's
    bool in_head = head.alone;
    for (u32 next = smem.first[kFirstTask];; is_written = false) {
        u32 index = next;
        if (next >= num_tasks_1 && next < end && orphan < num_blocks()) {
            if (lane == 0) {
                orphan = orphan == 0 && has_started(p, head) ? num_blocks() : find_orphan(p, head, orphan, num_tasks_1);
            }
            orphan = __shfl_sync(kFullMask, orphan, 0);
            if (orphan < num_blocks()) index = first_task(p, orphan++);
        }
        if (!is_written) {
            wait_barrier(p, kWaitTaskEmpty, &smem.task_empty[slot.stage], slot.stage, slot.empty_parity());
            task.phase = kDone;
            if (index < end) {
                task = decode_task(smem, index);
                trace_task(p, task);
                publish_rows(p, smem, head, task, slot.stage);
            }
            if (lane == 0) write_task(smem, slot.stage, task);
            publish_task(smem, slot.stage);
        }
        if (in_head && lane == 0) end_head(p, head);
        in_head = false;
        if (task.phase == kDone) break;
        trace_end(p, kEventTask);
        if (!claims_two(task, index, end)) wanted = slot;
        if (holds_back(task, end)) wait_for_mid(p, head, task.block);
        wait_barrier(p, kWaitTaskWanted, &smem.task_wanted[wanted.stage], wanted.stage, wanted.parity());
        wanted = slot;
        slot.advance();
        if (index != next) continue;
        if (lane == 0) next = claim(p, head);
        next = __shfl_sync(kFullMask, next, 0);
    }
    if constexpr (kNumRanks == 1) clear_unrouted_tokens(p);
    add_expert_counts(p, smem);
}

// The task in `slot`, for a role that reads it. Pairs with role_schedule; free_task gives the slot back.
DEVICE Task next_task(const Params& p, Smem& smem, const Ring<kNumTaskSlots>& slot) {
    wait_barrier(p, kWaitTaskFull, &smem.task_full[slot.stage], slot.stage, slot.parity());
    return read_task(smem, slot.stage);
}

// Every lane that reads the slot, after its last read.
DEVICE void free_task(Smem& smem, Ring<kNumTaskSlots>& slot) { arrive(&smem.task_empty[slot.stage]); }

// MXFP4: where the scales of the task's tile begin, as jitmoe/mxfp4.py packs them: of kMxRowWords rows as they lie in
// the tile, f32, then kMxWords for all that lands together.
template <typename P>
DEVICE const float* mx_scales(const P& p, const Task& task) {
    const bool gemm_1 = task.phase == kGemm1;
    const u32 tile = task.expert * (gemm_1 ? kNumTiles1 : kNumTiles2) + task.tile;
    return (gemm_1 ? p.w13_scale : p.w2_scale) + u64(tile) * (gemm_1 ? kMxTileWords1 : kMxTileWords2);
}

// Block scales: number i of a tile's weight rows in k-block 0; further k-blocks follow. GEMM 1: gate, up, and up of the
// next block where `intermediate` is no multiple of 128 and a tile's up rows straddle two. GEMM 2, interleaved
// rows and rows without a gate: the tile's two blocks of rows.
DEVICE const float* weight_scale(const Params& p, const Task& task, u32 i) {
    if (task.phase == kGemm2) {
        const i64 row = min_of(task.tile * 2 + i, ceil_div(kHidden, 128) - 1);
        return p.w2_scale + task.expert * p.w2_scale_expert_stride + row * p.w2_scale_row_stride;
    }
    constexpr u32 kLastBlock = ceil_div(kW13Rows, 128) - 1;
    i64 row = i == 0 ? task.tile : min_of(kUpBlockOffset + task.tile + i - 1, kLastBlock);
    if constexpr (kInterleaved || !kGated) row = min_of(2 * task.tile + i, kLastBlock);
    return p.w13_scale + task.expert * p.w13_scale_expert_stride + row * p.w13_scale_row_stride;
}
