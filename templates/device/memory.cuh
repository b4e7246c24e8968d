// Loads, stores, atomics and fences whose order or scope matters: the scope is in the name; the clock. Relies on
// types.cuh.

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

DEVICE u32 load_relaxed_gpu(const u32* address) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

DEVICE u32 load_acquire_gpu(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

DEVICE void store_relaxed_gpu(u32* address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DEVICE void store_release_gpu(u32* address, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// What this thread did in global memory is done before what follows.
DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// System scope: memory that other GPUs or the host access too.
DEVICE u32 load_relaxed_sys(const u32* address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

DEVICE u32 load_acquire_sys(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

DEVICE void store_relaxed_sys(u32* address, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DEVICE void store_release_sys(u32* address, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DEVICE void add_release_sys(u32* address, u32 value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

DEVICE void add_release_gpu(u32* address, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DEVICE u32 fetch_add_relaxed_gpu(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}

DEVICE u32 fetch_add_acq_rel_gpu(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}

DEVICE u32 compare_and_swap_gpu(u32* address, u32 expected, u32 desired) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(address), "r"(expected), "r"(desired)
                 : "memory");
    return old;
}

// Shared-memory counter; order comes from the barrier that follows.
DEVICE u32 fetch_add_shared(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "r"(shared_address(address)), "r"(value)
                 : "memory");
    return old;
}

// Generic-proxy writes to shared memory that this thread made, or knows of by a barrier, come before what it starts in
// the async proxy (TMA, WGMMA) from here on.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory: before a release of data that another CTA reads by TMA, and there after the acquire.
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// cp.async: copies by this thread, in the generic proxy. arrive_after_copies (mbarrier.cuh) or wait_for_copies tells
// when they are complete.
DEVICE void copy_16_async(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

DEVICE void copy_4_async(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// Copies of this thread since the last commit are a group; and until all but the newest kNewest groups have landed.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <u32 kNewest>
DEVICE void wait_for_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

// Until all copies of this thread so far have landed. For other threads a barrier must follow.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Time in units of 1.024 us that wraps after 73 minutes: one register instead of two in every wait.
DEVICE u32 global_timer_us() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return u32(now >> 10);
}

DEVICE void exit_thread() { asm volatile("exit;"); }
