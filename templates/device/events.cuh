// What a traced kernel tells of a warp (trace.cuh); tracing/events.py holds the names. Relies on types.cuh.

enum Event : u32 {
    kEventHead = 1,
    kEventTask = 2,  // payload: phase << 31 | expert << 16 | tile, and the block
    // Steps of a task. Each ends where the next begins or the task ends: they have no stamp for it.
    kEventMma = 3,       // a tile's main loop, from its first multiply on; payload: phase
    kEventEpilogue = 4,  // activation and re-quantisation, or slices
    kEventCombine = 5,   // delivery of slices, and the sums of whatever it completes
    kEventWait = 16,     // + Wait, if the first look was in vain; payload: index
};
