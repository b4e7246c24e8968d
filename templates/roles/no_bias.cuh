// In place of bias.cuh where experts have no biases: no code.

DEVICE void expect_weights(const Params&, Smem&, const Task&, u32, u32, u64* full) {
    arrive_expect_bytes(full, kWeightStageBytes);
}

template <Phase kPhase, u32 N, bool kTokenRows>
DEVICE void add_bias(const Params&, const Smem&, const Task&, const Share&, u32, const RouterWeights<N, kTokenRows>&,
                     float (&)[kShareBlocks<kTokenRows>][N / 2]) {}
