// Ranks and what they share: symmetric memory at the same offsets everywhere, and the number of the launch among all of
// the group's, which flags there hold: it only grows.

constexpr u32 kNumAllExperts = kNumRanks * kNumExperts;
constexpr u32 kUnused = ~0u;  // the expert of an unused slot

template <typename T>
DEVICE T* symmetric(const Params& p, u32 rank, i64 at) {
    return reinterpret_cast<T*>(p.peers[rank] + at);
}

// Of the launch, among all of the group's. Pairs with end_launch_number of the launch before.
constexpr u32 kFirstNumber = 3, kFirstAborted = 4;  // words of Smem::first
DEVICE u32 read_launch_number(const Params& p) { return load_acquire_gpu(symmetric<u32>(p, p.rank, p.launches_at)); }
DEVICE void publish_launch_number(const Params& p, Smem& smem, u32 number) {
    smem.first[kFirstNumber] = number;
    smem.first[kFirstAborted] = load_relaxed_gpu(p.header + kHeaderAbort);
}
DEVICE u32 launch_number() { return shared_memory<Smem>().first[kFirstNumber]; }
DEVICE void end_launch_number(const Params& p) {
    store_release_gpu(symmetric<u32>(p, p.rank, p.launches_at), launch_number() + 1);
}

// When a wait of the head has run out of time, the whole CTA leaves, so that it writes nothing that belongs to another
// launch, and before roles part: those that are left would wait for registers. One whole warp, before leave_if_aborted.
DEVICE void abort_head(Smem& smem) {
    if (lane_idx() == 0) smem.first[kFirstAborted] = 1;
}
DEVICE void leave_if_aborted(Smem& smem) {
    sync_block();
    if (smem.first[kFirstAborted] != 0) exit_thread();
}
