// Stamps of a traced kernel: when a warp begins and ends an event, in a ring of its own in Params::trace that keeps the
// newest. The first lane stamps for its warp, and the first warp of a warpgroup of one role for all four. Where the
// ring is and stands lies in shared memory, for math warps have no register to spare. An untraced kernel has
// no_stamps.cuh instead. Relies on trace.cuh, events.cuh, Params and Smem.

// What a stamp is of, else a beginning.
constexpr u32 kStampEnd = 128;
constexpr u32 kStampWhole = 64;

// Every thread, before the first stamp.
DEVICE void start_trace(const Params& p, Smem& smem) {
    const u32 warp = thread_idx() / kWarpThreads, ring = block_idx() * (kNumThreads / kWarpThreads) + warp;
    if (lane_idx() != 0) return;
    smem.trace_rings[warp][0] = reinterpret_cast<u64>(p.trace + u64(ring) * kTraceCapacity);
    smem.trace_rings[warp][1] = 0;
}

// A record is time, number << 8 | end or whole | event, and the payload: as tracing/events.py reads it.
DEVICE void stamp(const Params& p, u32 time, u32 event, u32 payload, u32 more) {
    u32 thread = thread_idx();
    forget_value(thread);  // else addresses that all stamps share stay in registers
    if (thread % (thread < 4 * kWarpThreads ? kWarpThreads : 4 * kWarpThreads) != 0) return;
    u64* ring = shared_memory<Smem>().trace_rings[thread / kWarpThreads];
    const u32 number = (*reinterpret_cast<u32*>(ring + 1))++;
    reinterpret_cast<uint4*>(ring[0])[number % kTraceCapacity] = make_uint4(time, number << 8 | event, payload, more);
}

DEVICE void trace_begin(const Params& p, u32 event, u32 payload = 0, u32 more = 0) {
    stamp(p, trace_time(), event, payload, more);
}

DEVICE void trace_end(const Params& p, u32 event) { stamp(p, trace_time(), event | kStampEnd, 0, 0); }

// An event in which nothing else begins or ends, in one record: half the text of a stamp at either end.
DEVICE void trace_whole(const Params& p, u32 begin, u32 event, u32 payload) {
    stamp(p, begin, event | kStampWhole, payload, trace_time());
}
