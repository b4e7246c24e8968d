// Stamps of a traced kernel: when a warp begins and ends an event, in a ring of its own in Params::trace that keeps the
// newest. The first lane stamps for its warp, and the first warp of a warpgroup of one role for all four. Where the
// ring stands lies in shared memory, for math warps have no register to spare. An untraced kernel has no_stamps.cuh
// instead. Relies on trace.cuh, events.cuh, Params and Smem.

constexpr u32 kStampEnd = 128;  // else it is a beginning

// Every thread, before the first stamp.
DEVICE void start_trace(Smem& smem) {
    if (lane_idx() == 0) smem.trace_next[thread_idx() / kWarpThreads] = 0;
}

// A record is time, number << 8 | end | event, and the payload: as tracing/events.py reads it.
DEVICE void stamp(const Params& p, u32 event, u32 payload, u32 more) {
    u32 thread = thread_idx();
    forget_value(thread);  // else addresses that all stamps share stay in registers
    if (thread % kWarpThreads != 0) return;
    const u32 warp = thread / kWarpThreads;
    if (warp >= 4 && warp % 4 != 0) return;
    const u32 number = shared_memory<Smem>().trace_next[warp]++;
    uint4* ring = p.trace + u64(block_idx() * (kNumThreads / kWarpThreads) + warp) * kTraceCapacity;
    ring[number % kTraceCapacity] = make_uint4(trace_time(), number << 8 | event, payload, more);
}

DEVICE void trace_begin(const Params& p, u32 event, u32 payload = 0, u32 more = 0) { stamp(p, event, payload, more); }
DEVICE void trace_end(const Params& p, u32 event) { stamp(p, event | kStampEnd, 0, 0); }
