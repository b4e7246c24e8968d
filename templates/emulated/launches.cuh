// Programmatic dependent launch. Relies on types.cuh.

DEVICE void start_next_launch() {}
DEVICE void wait_for_previous_launch() {}
