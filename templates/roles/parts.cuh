// Decode: tiles in parts along k. Every part leaves its sums in memory, as the threads hold them; the last to come adds
// them up, in the order of the parts, and finishes the tile.

constexpr u32 kPartSums = kShareBlocks<false> * kBlockTokens / 2;  // most of a thread

// Whether the sums are those of the whole tile.
template <u32 N, u32 kBlocks>
DEVICE bool join_parts(const Params& p, Smem& smem, const Head& head, const Task& task, u32 slot,
                       float (&sums)[kBlocks][N / 2]) {
    if (kSplitTokens || !is_in_parts(task)) return true;
    const u32 num_k = task.phase == kGemm1 ? kNumKBlocks1 : kNumKBlocks2;
    const u32 parts = num_parts(smem, task.phase);
    const u32 tile = task.block * (task.phase == kGemm1 ? kNumTiles1 : kNumTiles2) + task.tile;
    constexpr u32 kThreads = kNumMathWarps * kWarpThreads;
    // GEMM 2 may begin while parts of GEMM 1 are yet to be added up: each has places of its own.
    const u32 place = task.phase * kMaxBlocks + tile * parts;
    float4* first =
        reinterpret_cast<float4*>(p.parts) + u64(place) * (kPartSums / 4 * kThreads) + thread_idx() - kFirstMathThread;
    // Part i runs from num_k * i / parts on.
    float4* mine = first + u64(ceil_div(task.k_begin * parts, num_k)) * (kPartSums / 4 * kThreads);
#pragma unroll
    for (u32 m = 0; m < kBlocks; ++m) {
#pragma unroll
        for (u32 i = 0; i < N / 8; ++i) {
            const float* four = sums[m] + 4 * i;
            mine[(m * (N / 8) + i) * kThreads] = make_float4(four[0], four[1], four[2], four[3]);
        }
    }
    sync_math();
    if (thread_idx() == kFirstMathThread) {
        // Releases this part and, for the last, acquires all others: pairs with itself in other CTAs.
        // It spills if it is kept over the main loop of sums in bf16 or MXFP4, or without a gate.
        const Head same{kPromotes && kGated ? head.parity : smem.first[kFirstParity]};
        u32* count = counter(p, same, kBankParts + task.phase * kMaxBlocks + tile);
        smem.is_last_part[slot] = fetch_add_acq_rel_gpu(count, 1) + 1 == parts;
    }
    sync_math();
    if (smem.is_last_part[slot] == 0) return false;
#pragma unroll
    for (u32 m = 0; m < kBlocks; ++m) {
#pragma unroll
        for (u32 i = 0; i < N / 2; ++i) sums[m][i] = 0.0f;
    }
    for (u32 part = 0; part < parts; ++part, first += kPartSums / 4 * kThreads) {
#pragma unroll
        for (u32 m = 0; m < kBlocks; ++m) {
#pragma unroll
            for (u32 i = 0; i < N / 8; ++i) {
                const float4 four = first[(m * (N / 8) + i) * kThreads];
                sums[m][4 * i] += four.x;
                sums[m][4 * i + 1] += four.y;
                sums[m][4 * i + 2] += four.z;
                sums[m][4 * i + 3] += four.w;
                // One load in flight, else a traced kernel spills.
                if constexpr (kTrace && !kQuantizes) hold_accumulators(sums[m]);
            }
        }
    }
    return true;
}
