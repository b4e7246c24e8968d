// Counters of a launch, and who is through with its head. Launches of one stream may overlap: see device/launches.cuh.

// Words of one bank of counters. Launches alternate between two banks and each zeroes the other's, so nothing needs a
// memset between launches. Counters that many CTAs poll or add to have 128 bytes of their own.
constexpr u32 kBankBarrier = 32;     // CTAs at the grid barrier
constexpr u32 kBankHead = 64;        // CTAs that finished the head
constexpr u32 kBankPublished = 128;  // many ranks: CTAs that have written what all ranks read first
constexpr u32 kBankStaged = 160;     // and what they read then

constexpr u32 kFirstParity = 0;  // word of Smem::first: of the launch

struct Head {
    u32 parity;  // of the launch: which bank it counts in
    bool local;  // rows are sorted in shared memory, by every CTA for itself
    bool alone;  // and no CTA waits for the heads of all
};

// Worked out where needed: a pointer held through a role costs registers.
DEVICE u32* counter(const Params& p, const Head& head, u32 word) {
    return p.banks + u64(head.parity) * p.bank_words + word;
}

// The other bank served the previous launch, which must be over.
DEVICE void clear_other_bank(const Params& p, u32 parity) {
    u32* other = p.banks + u64(parity ^ 1) * p.bank_words;
    for (u32 i = block_idx() * kNumThreads + thread_idx(); i < p.bank_words; i += num_blocks() * kNumThreads) {
        other[i] = 0;
    }
}

// One thread, after a CTA barrier. Pairs with begin_head, begin_transfer and wait_for_head. The last CTA to come has
// seen every CTA read the parity and turns it. Then the next launch may start.
DEVICE void end_head(const Params& p, const Head& head) {
    if (fetch_add_acq_rel_gpu(counter(p, head, kBankHead), 1) == num_blocks() - 1) {
        store_release_gpu(p.header + kHeaderParity, head.parity ^ 1);
        end_launch_number(p);
        fence_gpu();  // it is done when the next launch starts
    }
    start_next_launch();
}

// Until every CTA has sorted its share of the pairs and brought in its share of the tokens. Pairs with end_head.
DEVICE void wait_for_head(const Params& p, const Head& head) {
    const u32 expected = num_blocks();
    wait_until(p, kWaitHead, 0, expected, [&] { return load_acquire_gpu(counter(p, head, kBankHead)) == expected; });
}
