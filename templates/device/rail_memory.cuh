// The rail through memory: where a rank's peer on another node is another GPU that it reaches by loads and stores.
// One whole warp each, with the same arguments in all lanes. Relies on memory.cuh, signals.cuh and barriers.cuh.

constexpr u32 kPutBatch = 4;  // loads of a lane that are in flight together

// Every warp that uses the rail, first of all.
DEVICE void begin_rail() {}

// Copies own symmetric memory [from, from + bytes) to [to, ...) of the rail's rank on `node`; multiples of 16.
DEVICE void put(const Params& p, u32 node, i64 to, i64 from, u32 bytes) {
    sync_warp();  // other lanes wrote the source
    const uint4* const source = reinterpret_cast<const uint4*>(p.peers[p.rank] + from);
    uint4* const target = reinterpret_cast<uint4*>(p.rail_peers[node] + to);
    const u32 end = bytes / 16;
    for (u32 first = lane_idx(); first < end; first += kPutBatch * kWarpThreads) {
        uint4 pieces[kPutBatch] = {};
#pragma unroll
        for (u32 i = 0; i < kPutBatch; ++i) {
            const u32 at = first + i * kWarpThreads;
            if (at < end) pieces[i] = source[at];
        }
#pragma unroll
        for (u32 i = 0; i < kPutBatch; ++i) {
            const u32 at = first + i * kWarpThreads;
            if (at < end) target[at] = pieces[i];
        }
    }
}

// Adds to a u64 word there. What all lanes have copied comes before what one lane releases, by the barrier of the warp.
DEVICE void signal_add(const Params& p, u32 node, i64 at, u64 value) {
    sync_warp();
    if (lane_idx() == 0) add_release_sys(reinterpret_cast<u64*>(p.rail_peers[node] + at), value);
}

// Until the sources of the warp's puts may be written over: every lane has read its part.
DEVICE void flush(const Params& p) { sync_warp(); }
