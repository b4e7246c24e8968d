// The 128-byte swizzle that TMA writes and WGMMA reads: within 8 rows of 128 bytes (1024-byte aligned), 16-byte chunk c
// of row r lies at chunk c ^ (r % 8). Relies on types.cuh.

DEVICE u32 swizzle_128(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row % 8)) << 4); }
