// Programmatic dependent launch (PTX ISA, griddepcontrol): the next launch of the stream may start before this one is
// over. Before wait_for_previous_launch it must not touch what the previous one reads or writes, but for atomics that
// the two agree on. Relies on types.cuh.

// One thread of every CTA; a CTA that exits counts too. It orders no memory.
DEVICE void start_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until all that the previous launches did in memory can be seen.
DEVICE void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
