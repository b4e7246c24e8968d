// In what order the channels of a token lie where the tensor cores read them. As they are, but for MXFP4 weights: math
// warps expand the eight codes of a word in an order that costs least (accumulate_mxfp4_*.cuh), and in each 32 channels
// tokens follow it. e4m3: the even channels, then the odd ones. bf16: of each eight neighbours channels 0 and 4, then 1
// and 5, 2 and 6, 3 and 7.

// Eight neighbouring channels from `channel` on, a multiple of 8, into a row: e4m3 or bf16.
DEVICE void store_channels(u8* row, u32 channel, uint2 codes) {
    if constexpr (kHasChunkScales) {
        u8* even = row + channel / 32 * 32 + channel % 32 / 2;
        *reinterpret_cast<u32*>(even) = permute_bytes(codes.x, codes.y, 0x6420);
        *reinterpret_cast<u32*>(even + 16) = permute_bytes(codes.x, codes.y, 0x7531);
    } else {
        *reinterpret_cast<uint2*>(row + channel) = codes;
    }
}

DEVICE void store_channels(u8* row, u32 channel, uint4 values) {
    if constexpr (kHasChunkScales) {
        u8* first = row + channel / 32 * 64 + channel % 32 / 2;
        *reinterpret_cast<u32*>(first) = permute_bytes(values.x, values.z, 0x5410);
        *reinterpret_cast<u32*>(first + 16) = permute_bytes(values.x, values.z, 0x7632);
        *reinterpret_cast<u32*>(first + 32) = permute_bytes(values.y, values.w, 0x5410);
        *reinterpret_cast<u32*>(first + 48) = permute_bytes(values.y, values.w, 0x7632);
    } else {
        *reinterpret_cast<uint4*>(row + channel * 2) = values;
    }
}

// 32 channels of a token in place, whose 16-byte chunks lie at `first` XOR 16 * i in a tile.
DEVICE void order_channels(u8* tile, u32 first) {
    constexpr u32 kChunks = kOrderedBytes / 16;
    uint4 given[kChunks], ordered[kChunks];
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) given[i] = *reinterpret_cast<const uint4*>(tile + (first ^ i * 16));
    if constexpr (kChunks == 2) {
        const u32 words[8] = {given[0].x, given[0].y, given[0].z, given[0].w,
                              given[1].x, given[1].y, given[1].z, given[1].w};
#pragma unroll
        for (u32 i = 0; i < kChunks; ++i) {
            const u32 selector = i == 0 ? 0x6420 : 0x7531;
            ordered[i] =
                make_uint4(permute_bytes(words[0], words[1], selector), permute_bytes(words[2], words[3], selector),
                           permute_bytes(words[4], words[5], selector), permute_bytes(words[6], words[7], selector));
        }
    } else if constexpr (kChunks == 4) {
#pragma unroll
        for (u32 i = 0; i < kChunks; ++i) {
            const u32 selector = i % 2 == 0 ? 0x5410 : 0x7632;
            const auto pair = [&](const uint4& v) {
                return i < 2 ? permute_bytes(v.x, v.z, selector) : permute_bytes(v.y, v.w, selector);
            };
            ordered[i] = make_uint4(pair(given[0]), pair(given[1]), pair(given[2]), pair(given[3]));
        }
    }
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) *reinterpret_cast<uint4*>(tile + (first ^ i * 16)) = ordered[i];
}
