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

// The magnitude of a code times 2^(exponent - 9), in e4m3: its exponent is bits 3..6.
DEVICE u32 expansion(u32 code, u32 exponent) {
    if (code == 0 || exponent == 0) return 0;
    const u32 significand = code == 1 ? 8 : 8 | code % 2 << 2;  // 0.5 is 2^-1, as if it were normal
    const i32 biased = i32(code / 2 + exponent) - 3;
    return biased > 0 ? u32(biased) << 3 | significand % 8 : significand >> (1 - biased);
}

// Of all exponents, the codes' bytes in their order. Published by the barriers of the head.
DEVICE void fill_expansions(Smem& smem) {
    const u32 exponent = thread_idx();
    if (exponent >= 16) return;
    for (u32 half = 0; half < 2; ++half) {
        u32 bytes = 0;
        for (u32 i = 0; i < 4; ++i) bytes |= expansion(half * 4 + i, exponent) << 8 * i;
        smem.expansions[exponent][half] = bytes;
    }
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

// Of its eight rows, two at a time: the next are loaded before these are stored.
constexpr u32 kRowsALane = 8, kRowsAtOnce = 2, kSteps = kRowsALane / kRowsAtOnce;

DEVICE Chunks find_chunks() {
    const u32 lane = lane_idx(), row = (warp_idx() - kExpandWarpBegin) * 64 + lane / 4;
    return {row, lane % 4, lane % 4 ^ row / 2 % 4};
}

struct Expandable {
    uint4 codes[kRowsAtOnce];
    uint2 of_magnitude[kRowsAtOnce];
};

// Rows number `first` .. of the lane.
DEVICE void load_chunks(const Smem& smem, const Chunks& c, u32 stage, u32 first, Expandable& chunks) {
    const u8* packed = smem.packed_tiles[stage] + c.row * kWeightKBytes + c.place * 16;
    // Of a row's chunks, 4 bits each; those of a lane's rows lie together (jitmoe/mxfp4.py).
    const u8* exponents = smem.weight_scales[stage] + (c.row / 64 * 8 + c.row % 8) * (kRowsALane * 2);
    u32 pairs[kRowsAtOnce / 2];
#pragma unroll
    for (u32 i = 0; i < kRowsAtOnce / 2; ++i) pairs[i] = reinterpret_cast<const u32*>(exponents)[first / 2 + i];
#pragma unroll
    for (u32 i = 0; i < kRowsAtOnce; ++i) {
        chunks.codes[i] = *reinterpret_cast<const uint4*>(packed + (first + i) * (8 * kWeightKBytes));
    }
#pragma unroll
    for (u32 i = 0; i < kRowsAtOnce; ++i) {
        const u32 exponent = pairs[i / 2] >> (i % 2 * 16 + c.chunk * 4) & 15;
        chunks.of_magnitude[i] = *reinterpret_cast<const uint2*>(smem.expansions[exponent]);
    }
}

DEVICE void store_chunks(Smem& smem, const Chunks& c, u32 stage, u32 first, const Expandable& chunks) {
    u8* tile = smem.weight_tiles[stage] + first * (8 * kBlockKBytes);
    const u32 low = swizzle_128(c.row, 2 * c.chunk), high = swizzle_128(c.row, 2 * c.chunk + 1);
#pragma unroll
    for (u32 i = 0; i < kRowsAtOnce; ++i, tile += 8 * kBlockKBytes) {
        const uint4 codes = chunks.codes[i];
        const uint2 table = chunks.of_magnitude[i];
        const uint2 x = expand_codes(codes.x, table), y = expand_codes(codes.y, table);
        const uint2 z = expand_codes(codes.z, table), w = expand_codes(codes.w, table);
        *reinterpret_cast<uint4*>(tile + low) = make_uint4(x.x, x.y, y.x, y.y);
        *reinterpret_cast<uint4*>(tile + high) = make_uint4(z.x, z.y, w.x, w.y);
    }
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
            Expandable chunks[2];
            load_chunks(smem, mine, packed.stage, 0, chunks[0]);
            wait_barrier(p, kWaitStageEmpty, &smem.empty[ring.stage], ring.stage, ring.empty_parity());
#pragma unroll
            for (u32 i = 0; i < kSteps; ++i) {
                if (i + 1 < kSteps) load_chunks(smem, mine, packed.stage, (i + 1) * kRowsAtOnce, chunks[(i + 1) % 2]);
                store_chunks(smem, mine, ring.stage, i * kRowsAtOnce, chunks[i % 2]);
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
