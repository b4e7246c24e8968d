// Launches of one stream that overlap (PTX ISA, griddepcontrol; CUDA programming guide, programmatic dependent launch).
// Relies on types.cuh.

// The next launch may start once every CTA of this one has executed it, in any one thread, or has exited. It orders no
// memory: the next launch waits before it looks.
DEVICE void start_next_launch() { emu::start_next_launch(); }

// Until the launches before this one have ended and the calling thread sees all that they did to memory; at once if
// there is nothing to wait for. Others learn of it by a barrier.
DEVICE void wait_for_previous_launch() { emu::wait_for_previous_launch(); }
