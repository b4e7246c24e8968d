// Stores and loads of 8x8 matrices of 16-bit elements (PTX ISA, stmatrix and ldmatrix): as they are, or transposed.
// Relies on memory.cuh.

template <u32 kNum>
DEVICE void store_matrices(void* row, const u32 (&m)[kNum]) {
    static_assert(kNum == 1 || kNum == 2 || kNum == 4, "stmatrix stores 1, 2 or 4 matrices");
    emu::store_matrices(row, m, kNum, false);
}

template <u32 kNum>
DEVICE void store_matrices_transposed(void* row, const u32 (&m)[kNum]) {
    static_assert(kNum == 1 || kNum == 2 || kNum == 4, "stmatrix stores 1, 2 or 4 matrices");
    emu::store_matrices(row, m, kNum, true);
}

template <u32 kNum>
DEVICE void load_matrices(const void* row, u32 (&m)[kNum]) {
    static_assert(kNum == 2 || kNum == 4, "two or four are loaded at once");
    emu::load_matrices(row, m, kNum);
}
