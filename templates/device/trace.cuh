// The clock of a traced kernel's stamps (stamps.cuh). Relies on types.cuh.

// Nanoseconds, of one clock for the whole GPU; wraps after 4 s.
DEVICE u32 trace_time() {
    u32 now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
    return now;
}
