// Tasks of a launch that are claimed: the first of every CTA, those that follow, and what is left of CTAs that do not
// run. Relies on bank.cuh.

constexpr u32 kBankTask = 0;                              // tasks claimed beyond the first of every CTA
constexpr u32 kBankStarted = 96;                          // CTAs that run
constexpr u32 kBankFirst = kNumRanks > 1 ? 192 : 128;     // claims of the first task of each CTA
constexpr u32 kBankParts = kBankFirst + kMaxBlocks;       // parts finished of a tile, by GEMM
constexpr u32 kBankCounts = kBankParts + 2 * kMaxBlocks;  // rows of each expert
constexpr u32 kBankDone = kBankCounts + kNumExperts;      // many ranks: GEMM 2 tiles finished, by expert
constexpr u32 kBankBlocks = kBankDone + (kNumRanks > 1 ? kNumExperts : 0);  // GEMM 1 tiles finished, by block

// Words of Smem::first.
constexpr u32 kFirstTask = 1;       // of the CTA
constexpr u32 kFirstPreloaded = 2;  // weight tiles of it that are on their way

// Tasks beyond the first of every CTA.
DEVICE u32 claim(const Params& p, const Head& head) {
    return num_blocks() + fetch_add_relaxed_gpu(counter(p, head, kBankTask), 1);
}

// The first task of a CTA. CTAs with neighbouring numbers share ways to memory: few tasks go to CTAs far apart.
DEVICE u32 first_task(const Params& p, u32 block) { return block * p.first_stride % num_blocks(); }

// True once for each CTA's first task: mostly the CTA itself takes it.
DEVICE bool take_first_task(const Params& p, const Head& head, u32 block) {
    return fetch_add_relaxed_gpu(counter(p, head, kBankFirst + block), 1) == 0;
}

// GEMM 2 waits for GEMM 1, so whoever comes to it first takes over what CTAs that do not run have left of GEMM 1: a
// launch needs no more than one CTA at a time. CTAs that start late have their time: they are a few microseconds behind
// unless other kernels hold their SMs.
DEVICE bool has_started(const Params& p, const Head& head) {
    constexpr u32 kPatienceUs = 20;
    const u32 begin = global_timer_us();
    while (load_relaxed_gpu(counter(p, head, kBankStarted)) < num_blocks()) {
        if (global_timer_us() - begin > kPatienceUs) return false;
    }
    return true;
}

// The next CTA, from `block` on, whose first task is of GEMM 1 and nobody's: now it is the caller's. One lane.
DEVICE u32 find_orphan(const Params& p, const Head& head, u32 block, u32 num_tasks_1) {
    while (block < num_blocks() && !(first_task(p, block) < num_tasks_1 && take_first_task(p, head, block))) ++block;
    return block;
}

// What one lane fetches at the start and publishes later: round trips that pass while others read and sort the ids. It
// is of the last warp that sorts: the least likely to have ids.
constexpr u32 kFirstThread = (kMathWarpBegin + kNumMathWarps - 1) * kWarpThreads;

struct First {
    u32 parity, task, number;
};

// The launch before may not be over, but its CTAs have ended their heads: the parity is turned and the bank is clear.
// Pairs with end_head.
DEVICE First begin_head(const Params& p) {
    if (thread_idx() != kFirstThread) return {};
    const Head head{load_acquire_gpu(p.header + kHeaderParity) & 1};
    const bool is_mine = take_first_task(p, head, block_idx());
    fetch_add_relaxed_gpu(counter(p, head, kBankStarted), 1);  // pairs with has_started
    return {head.parity, is_mine ? first_task(p, block_idx()) : claim(p, head), read_launch_number(p)};
}

// Before a CTA barrier.
DEVICE void publish_first(const Params& p, Smem& smem, const First& first) {
    if (thread_idx() != kFirstThread) return;
    smem.first[kFirstParity] = first.parity;
    smem.first[kFirstTask] = first.task;
    smem.first[kFirstPreloaded] = 0;
    publish_launch_number(p, smem, first.number);
}
