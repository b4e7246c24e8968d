// Weights with a scale for each output channel, or one for many, instead of one for each block: the main loop knows
// nothing of it, and a tile's sums are multiplied by it once they are whole. Beside the main loop, every math warp
// copies the scales of its weight rows into its own Smem::transpose, which only its epilogues use.

static_assert(kBlockRows * sizeof(float) <= sizeof(Smem::transpose) / kNumMathWarps, "a tile's scales have room");

DEVICE float* channel_scales(Smem& smem, const Share& share) {
    return reinterpret_cast<float*>(smem.transpose[share.group * 4 + share.warp]);
}

// The scale of a tile's weight row. Rows past the end take the last channel's: their sums are zeros.
// `P` is Params, which other kernels have without the stride from gate to up.
template <typename P>
DEVICE const float* channel_scale(const P& p, const Task& task, u32 row) {
    if constexpr (kMxRowWords > 0) {
        return mx_scales(p, task) + row;
    } else {
        if (task.phase == kGemm2) {
            const i64 channel = min_of(task.tile * kBlockRows + row, kHidden - 1);
            return p.w2_scale + task.expert * p.w2_scale_expert_stride + channel * p.w2_scale_row_stride;
        }
        // Groups of 8 rows alternate between gate and up, if there is a gate.
        const u32 i = kGated ? row / 16 * 8 + row % 8 : row;
        const i64 channel = min_of(task.tile * kTileChannels + i, kIntermediate - 1);
        const i64 half = kGated ? row / 8 % 2 : 0;
        return p.w13_scale + task.expert * p.w13_scale_expert_stride + channel * p.w13_scale_row_stride +
               half * p.w13_scale_half_stride;
    }
}

// Of all the tile's rows, or of this warp's.
template <bool kTokenRows, typename P>
DEVICE void begin_channel_scales(const P& p, Smem& smem, const Task& task, const Share& share) {
    float* scales = channel_scales(smem, share);
    sync_warp();  // all lanes are done with the epilogue before
#pragma unroll
    for (u32 i = lane_idx(); i < (kTokenRows ? kBlockRows : kShareBlocks<false> * 16); i += kWarpThreads) {
        const u32 row = kTokenRows ? i : share.first_row + i / 16 * 64 + share.warp * 16 + i % 16;
        copy_4_async(scales + row, channel_scale(p, task, row));
    }
}

// Of tiles in parts too, though most need none: the next tile's copies go to the same place.
DEVICE void end_channel_scales() {
    wait_for_copies();
    sync_warp();
}

template <u32 N, bool kTokenRows>
DEVICE void apply_channel_scales(Smem& smem, const Share& share, float (&sums)[kShareBlocks<kTokenRows>][N / 2]) {
    u32 lane = lane_idx();
    if constexpr (kHasBias) forget_value(lane);  // as in add_bias: at some sizes the main loop would spill
    const float* scales = channel_scales(smem, share);
#pragma unroll
    for (u32 m = 0; m < kShareBlocks<kTokenRows>; ++m) {
#pragma unroll
        for (u32 j = 0; j < N / 8; ++j) {
            float* four = sums[m] + 4 * j;
            if constexpr (kTokenRows) {
                const float2 two = *reinterpret_cast<const float2*>(scales + m * 64 + j * 8 + lane % 4 * 2);
                four[0] *= two.x;
                four[1] *= two.y;
                four[2] *= two.x;
                four[3] *= two.y;
                if (kHasBias && kExpands && j % 2 == 1) sync_warp();  // not all scales ahead: as below
            } else {
                const u32 row = share.first_row + m * 64 + share.warp * 16 + lane / 4;
                const float low = scales[row], high = scales[row + 8];
                four[0] *= low;
                four[1] *= low;
                four[2] *= high;
                four[3] *= high;
            }
        }
        if constexpr (kHasBias) sync_warp();
    }
}
