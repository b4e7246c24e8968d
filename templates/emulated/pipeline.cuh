// The only stage and phase arithmetic of the project. Relies on types.cuh.

// A position in a ring of kStages buffers. The consumer waits for `full` with parity(), the producer for `empty` with
// empty_parity(): the first pass finds every buffer free.
template <u32 kStages>
struct Ring {
    u32 stage = 0;
    u32 phase = 0;

    DEVICE u32 parity() const { return phase; }
    DEVICE u32 empty_parity() const { return phase ^ 1; }
    DEVICE void advance() {
        stage += 1;
        if (stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};
