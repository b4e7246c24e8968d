// The clock of a traced kernel's stamps (stamps.cuh): steps of the emulator's scheduler. Relies on types.cuh.

DEVICE u32 trace_time() { return u32(emu::clock_steps()); }
