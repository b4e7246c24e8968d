// Loads, stores, atomics and fences whose order or scope matters: the scope is in the name. Relies on types.cuh.

DEVICE u32 shared_address(const void* pointer) { return emu::shared_address(pointer); }

DEVICE u32 load_relaxed_gpu(const u32* address) { return emu::load(address, emu::kRelaxed, emu::kGpu); }

DEVICE u32 load_acquire_gpu(const u32* address) { return emu::load(address, emu::kAcquire, emu::kGpu); }

DEVICE void store_relaxed_gpu(u32* address, u32 value) { emu::store(address, value, emu::kRelaxed, emu::kGpu); }

DEVICE void store_release_gpu(u32* address, u32 value) { emu::store(address, value, emu::kRelease, emu::kGpu); }

// What this thread did in global memory is done before what follows.
DEVICE void fence_gpu() { emu::fence(emu::kGpu); }

// System scope: memory that other GPUs or the host access too.
DEVICE u32 load_relaxed_sys(const u32* address) { return emu::load(address, emu::kRelaxed, emu::kSys); }

DEVICE u32 load_acquire_sys(const u32* address) { return emu::load(address, emu::kAcquire, emu::kSys); }

DEVICE void store_relaxed_sys(u32* address, u32 value) { emu::store(address, value, emu::kRelaxed, emu::kSys); }

DEVICE void store_release_sys(u32* address, u32 value) { emu::store(address, value, emu::kRelease, emu::kSys); }

DEVICE void add_release_sys(u32* address, u32 value) { emu::fetch_add(address, value, emu::kRelease, emu::kSys); }

DEVICE void fence_sys() { emu::fence(emu::kSys); }

DEVICE void add_release_gpu(u32* address, u32 value) { emu::fetch_add(address, value, emu::kRelease, emu::kGpu); }

DEVICE u32 fetch_add_relaxed_gpu(u32* address, u32 value) {
    return emu::fetch_add(address, value, emu::kRelaxed, emu::kGpu);
}

DEVICE u32 fetch_add_acq_rel_gpu(u32* address, u32 value) {
    return emu::fetch_add(address, value, emu::kAcqRel, emu::kGpu);
}

DEVICE u32 compare_and_swap_gpu(u32* address, u32 expected, u32 desired) {
    return emu::compare_and_swap(address, expected, desired, emu::kRelaxed, emu::kGpu);
}

// Shared-memory counter; order comes from the barrier that follows.
DEVICE u32 fetch_add_shared(u32* address, u32 value) {
    return emu::fetch_add(address, value, emu::kRelaxed, emu::kCta);
}

// Generic-proxy writes to shared memory that this thread made, or knows of by a barrier, come before what it starts in
// the async proxy (TMA, WGMMA) from here on.
DEVICE void fence_async_shared() { emu::fence_async_shared(); }

// The same for global memory: before a release of data that another CTA reads by TMA, and there after the acquire.
DEVICE void fence_async_global() { emu::fence_async_global(); }

// cp.async: copies by this thread, in the generic proxy. arrive_after_copies (mbarrier.cuh) or wait_for_copies tells
// when they are complete.
DEVICE void copy_16_async(void* shared, const void* global) { emu::copy_async(shared, global, 16); }

DEVICE void copy_4_async(void* shared, const void* global) { emu::copy_async(shared, global, 4); }

// Copies of this thread since the last commit are a group; and until all but the newest kNewest groups have landed.
DEVICE void commit_copies() { emu::commit_copies(); }

template <u32 kNewest>
DEVICE void wait_for_copy_groups() {
    emu::wait_for_copy_groups(kNewest);
}

// Until all copies of this thread so far have landed. For other threads a barrier must follow.
DEVICE void wait_for_copies() { emu::wait_for_copies(); }

// Time in units of 1.024 us that wraps after 73 minutes: one register instead of two in every wait.
DEVICE u32 global_timer_us() { return u32(emu::clock_ns() >> 10); }

DEVICE void exit_thread() { emu::exit_thread(); }
