// The rail through a network card (jitmoe/emulate/runtime/rail.cpp). One whole warp each, with the same arguments in
// all lanes. Relies on barriers.cuh.

// Every warp that uses the rail, first of all.
DEVICE void begin_rail() {}

// Copies own symmetric memory [from, from + bytes) to [to, ...) of the rail's rank on `node`; multiples of 16.
DEVICE void put(const Params& p, u32 node, i64 to, i64 from, u32 bytes) {
    sync_warp();  // other lanes wrote the source
    const u32 words[] = {node, u32(to), u32(to >> 32), u32(from), u32(from >> 32), bytes};
    for (u32 word : words) make_uniform(word);
    if (lane_idx() != 0) return;
    emu::put_rail(p.rank / kNodeRanks, node, p.rail_peers[node] + to, p.peers[p.rank] + from, bytes);
}

// Adds to a u64 word there, when the puts that this warp made to that node have landed.
DEVICE void signal_add(const Params& p, u32 node, i64 at, u64 value) {
    sync_warp();
    const u32 words[] = {node, u32(at), u32(at >> 32), u32(value), u32(value >> 32)};
    for (u32 word : words) make_uniform(word);
    if (lane_idx() != 0) return;
    emu::signal_rail(p.rank / kNodeRanks, node, reinterpret_cast<u64*>(p.rail_peers[node] + at), value);
}

// Until the sources of the warp's puts may be written over.
DEVICE void flush(const Params& p) {
    sync_warp();
    if (lane_idx() == 0) emu::flush_rail();
    sync_warp();
}
