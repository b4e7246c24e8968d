// Words that other GPUs or a network card change: counters of 64 bits and masks, in system scope. Relies on types.cuh.

DEVICE u64 load_acquire_sys(const u64* address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

DEVICE void store_relaxed_sys(u64* address, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

DEVICE void add_release_sys(u64* address, u64 value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

DEVICE void or_release_sys(u32* address, u32 bits) {
    asm volatile("red.release.sys.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}
