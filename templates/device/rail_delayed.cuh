// The rail through memory, as a network card might have it: puts are only noted, and carried out late and the newest
// first. It finds on one GPU who relies on more than the rail promises. One whole warp each, with the same arguments in
// all lanes. Relies on memory.cuh, signals.cuh, barriers.cuh and on Smem::rail_queue, of each warp: in row 0 how many
// rows are in use; further rows are puts, {to / 16, from / 16, bytes, node}, of no bytes when carried out.

constexpr u32 kQueuedPuts = sizeof(Smem::rail_queue) / sizeof(uint4) / (kNumThreads / kWarpThreads) - 1;
constexpr u32 kAllNodes = ~0u;
constexpr u32 kLongestPause = 20;  // us

DEVICE uint4* rail_queue() {
    return reinterpret_cast<uint4*>(shared_memory<Smem>().rail_queue) + thread_idx() / kWarpThreads * (kQueuedPuts + 1);
}

// Every warp that puts, first of all: shared memory holds anything.
DEVICE void begin_rail() {
    if (lane_idx() == 0) *rail_queue() = make_uint4(0, 0, 0, 0);
    sync_warp();
}

// Up to kLongestPause, by the clock of lane 0.
DEVICE void pause_at_random() {
    const u32 start = __shfl_sync(kFullMask, global_timer_us(), 0);
    const u32 mixed = (start * 31 + block_idx()) * 67 + thread_idx() / kWarpThreads;
    const u32 pause = (mixed * 2654435761u >> 16) % (kLongestPause + 1);
    while (__shfl_sync(kFullMask, global_timer_us(), 0) - start < pause) {
    }
}

// The puts to `node`, or all. Behind it every lane knows of what all have copied.
DEVICE void carry_out_puts(const Params& p, u32 node) {
    uint4* const queue = rail_queue();
    sync_warp();
    const u32 num = queue->x;
    bool has_paused = false;
#pragma unroll 1
    for (u32 i = num; i > 0; --i) {
        const uint4 noted = queue[i];
        if (node != kAllNodes && noted.w != node) continue;
        if (noted.z != 0 && !has_paused) pause_at_random();
        has_paused |= noted.z != 0;
        sync_warp();  // all lanes have read it
        if (lane_idx() == 0) queue[i].z = 0;
        const uint4* const source = reinterpret_cast<const uint4*>(p.peers[p.rank]) + noted.y;
        uint4* const target = reinterpret_cast<uint4*>(p.rail_peers[noted.w]) + noted.x;
#pragma unroll 1
        for (u32 at = lane_idx(); at < noted.z / 16; at += kWarpThreads) target[at] = source[at];
    }
    sync_warp();
    if (node == kAllNodes && lane_idx() == 0) queue->x = 0;
}

// Copies own symmetric memory [from, from + bytes) to [to, ...) of the rail's rank on `node`; multiples of 16.
DEVICE void put(const Params& p, u32 node, i64 to, i64 from, u32 bytes) {
    uint4* const queue = rail_queue();
    sync_warp();
    if (queue->x == kQueuedPuts) carry_out_puts(p, kAllNodes);
    sync_warp();  // all lanes have seen whether it is full
    if (lane_idx() != 0) return;
    queue->x += 1;
    queue[queue->x] = make_uint4(u32(to / 16), u32(from / 16), bytes, node);
}

// Adds to a u64 word there, when the puts that this warp made to that node have landed.
DEVICE void signal_add(const Params& p, u32 node, i64 at, u64 value) {
    carry_out_puts(p, node);
    if (lane_idx() == 0) add_release_sys(reinterpret_cast<u64*>(p.rail_peers[node] + at), value);
}

// Until the sources of the warp's puts may be written over.
DEVICE void flush(const Params& p) { carry_out_puts(p, kAllNodes); }
