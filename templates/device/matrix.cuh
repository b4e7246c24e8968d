// Stores and loads of 8x8 matrices of 16-bit elements (PTX ISA, stmatrix and ldmatrix). Register i of lane l holds row
// l / 4, columns 2 * (l % 4) and + 1 of matrix i; lane 8 * i + r gives the address of row r of matrix i, or of its
// transpose. Relies on memory.cuh.

DEVICE void store_matrices(void* row, const u32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

DEVICE void store_matrices_transposed(void* row, const u32 (&m)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_address(row)), "r"(m[0])
                 : "memory");
}

DEVICE void store_matrices_transposed(void* row, const u32 (&m)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(m[0]),
                 "r"(m[1])
                 : "memory");
}

DEVICE void store_matrices_transposed(void* row, const u32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

DEVICE void load_matrices(const void* row, u32 (&m)[2]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(shared_address(row)));
}

DEVICE void load_matrices(const void* row, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}
