// Launches of one stream that overlap (PTX ISA, griddepcontrol; CUDA programming guide, programmatic dependent launch).
// A launch may start while the one before it runs, if the host said so. Until its wait it must not read what launches
// before it write, nor write what they access, nor rely on a state that they leave behind; what it does to memory of
// its own, and reads of what no launch writes, may come first. Relies on types.cuh.

// The next launch may start once every CTA of this one has executed it, in any one thread, or has exited. It orders no
// memory: the next launch waits before it looks.
DEVICE void start_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until the launches before this one have ended and the calling thread sees all that they did to memory; at once if
// there is nothing to wait for. Others learn of it by a barrier.
DEVICE void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
