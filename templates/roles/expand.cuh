// The expand warps, for MXFP4 weights beside e4m3 tokens (OCP Microscaling Formats 1.0). Weights land packed, two e2m1
// codes a byte, the first in the low half, in a ring of their own. From there these warps write them as e4m3 into the
// weight tiles that the main loop of FP8 takes: a code's value times 2^6, and times the power of two that the scale of
// its 32 is of the row's largest, which is the channel's scale (channel_scales.cuh). That power is 2^(exponent - 15),
// and the products are exact but for exponent 0, of weights too small to count.

constexpr u32 kWeightArrivals = kNumExpandWarps;  // at a full stage

DEVICE void init_landing(Smem& smem) {
    for (u32 i = 0; i < kNumLoadStages; ++i) {
        init_barrier(&smem.landed[i], 1);               // the load lane
        init_barrier(&smem.taken[i], kNumExpandWarps);  // a lane of each expand warp
    }
}

DEVICE u8* landing_tile(Smem& smem, u32 stage) { return smem.packed_tiles[stage]; }

// Pairs with role_expand, as the next.
DEVICE u64* landed(Smem& smem, u32 stage) { return &smem.landed[stage]; }

DEVICE void wait_for_room(const Params& p, Smem& smem, const Ring<kNumLoadStages>& ring) {
    wait_barrier(p, kWaitTaken, &smem.taken[ring.stage], ring.stage, ring.empty_parity());
}

// Bytes of the eight magnitudes, times 2^(exponent - 6). e4m3 has its exponent in bits 3..6: that of 0.5 is the
// chunk's.
DEVICE uint2 magnitudes_of(u32 exponent) {
    return make_uint2(exponent * 0x08080800u + 0x0c080000u, exponent * 0x08080808u + 0x1c181410u);
}

// Eight codes. A selector of bytes is three bits of a code; its sign is the fourth.
DEVICE uint2 expand_codes(u32 codes, uint2 of_magnitude) {
    constexpr u32 kSigns = 0x80808080u;
    const u32 magnitudes = codes & 0x77777777u,
              even = codes << 4;  // signs of even codes in bits 7, of odd ones in codes
    return make_uint2(
        permute_bytes(of_magnitude.x, of_magnitude.y, magnitudes) | (permute_bytes(even, codes, 0x5140) & kSigns),
        permute_bytes(of_magnitude.x, of_magnitude.y, magnitudes >> 16) |
            (permute_bytes(even, codes, 0x7362) & kSigns));
}

// What a lane expands of a tile: a chunk of 32 codes of every eighth of the warp's 64 rows. TMA's 64-byte swizzle lands
// chunk c of row r at chunk c ^ (r / 2 % 4), so that a warp reads 512 bytes as they lie.
struct Chunks {
    u32 row;    // the first
    u32 place;  // of the chunk in the packed row
    u32 chunk;
};

constexpr u32 kRowsALane = 8, kRowsAhead = 2;  // loaded before the first is stored

DEVICE Chunks find_chunks() {
    const u32 lane = lane_idx(), row = (warp_idx() - kExpandWarpBegin) * 64 + lane / 4;
    return {row, lane % 4, lane % 4 ^ row / 2 % 4};
}

DEVICE uint4 load_codes(const Smem& smem, const Chunks& c, u32 stage, u32 i) {
    return *reinterpret_cast<const uint4*>(smem.packed_tiles[stage] + (c.row + i * 8) * kWeightKBytes + c.place * 16);
}

// Of the chunks of the lane's rows, 16 bits a row (jitmoe/mxfp4.py).
DEVICE uint4 load_exponents(const Smem& smem, const Chunks& c, u32 stage) {
    const u32 rows = c.row / 64 * 8 + c.row % 8;
    return *reinterpret_cast<const uint4*>(smem.weight_scales[stage] + rows * (kRowsALane * 2));
}

DEVICE void store_chunk(Smem& smem, const Chunks& c, u32 stage, u32 i, uint4 codes, u32 exponent) {
    const uint2 table = magnitudes_of(exponent);
    const uint2 x = expand_codes(codes.x, table), y = expand_codes(codes.y, table);
    const uint2 z = expand_codes(codes.z, table), w = expand_codes(codes.w, table);
    u8* row = smem.weight_tiles[stage] + i * (8 * kBlockKBytes);
    *reinterpret_cast<uint4*>(row + swizzle_128(c.row, 2 * c.chunk)) = make_uint4(x.x, x.y, y.x, y.y);
    *reinterpret_cast<uint4*>(row + swizzle_128(c.row, 2 * c.chunk + 1)) = make_uint4(z.x, z.y, w.x, w.y);
}

DEVICE void role_expand(const Params& p, Smem& smem, const Head&) {
    Ring<kNumTaskSlots> slot;
    Ring<kNumLoadStages> packed;
    Ring<kNumStages> ring;
    const Chunks mine = find_chunks();
    for (;; slot.advance()) {
        const Task task = next_task(p, smem, slot);
        free_task(smem, slot);
        if (task.phase == kDone) return;
        trace_task(p, task);
        for (u32 k = task.k_begin; k < task.k_end; ++k, packed.advance(), ring.advance()) {
            wait_barrier(p, kWaitLanded, &smem.landed[packed.stage], packed.stage, packed.parity());
            const uint4 four = load_exponents(smem, mine, packed.stage);
            const u32 exponents[kRowsALane / 2] = {four.x, four.y, four.z, four.w};
            uint4 codes[kRowsAhead];
#pragma unroll
            for (u32 i = 0; i < kRowsAhead; ++i) codes[i] = load_codes(smem, mine, packed.stage, i);
            wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
#pragma unroll
            for (u32 i = 0; i < kRowsALane; ++i) {
                const u32 exponent = exponents[i / 2] >> (i % 2 * 16 + mine.chunk * 4) & 15;
                store_chunk(smem, mine, ring.stage, i, codes[i % kRowsAhead], exponent);
                if (i + kRowsAhead < kRowsALane) {
                    codes[i % kRowsAhead] = load_codes(smem, mine, packed.stage, i + kRowsAhead);
                }
            }
            fence_async_shared();  // the tensor cores read the tile
            sync_warp();
            if (lane_idx() == 0) {
                arrive(&smem.taken[packed.stage]);  // pairs with role_load
                arrive(&smem.full[ring.stage]);     // pairs with role_math: multiply
            }
        }
        trace_end(p, kEventTask);
    }
}
