// Barriers of a CTA, of some of its warps, and of the grid; and the register split. Relies on memory.cuh, check.cuh.

// Hardware barriers; 0 is left to sync_block.
enum NamedBarrier : u32 {
    kMathBarrier = 1,  // all math warps, or warpgroup w of them at kMathBarrier + w
};

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// All `num_threads` threads that use barrier `id`.
DEVICE void sync_named(u32 id, u32 num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// One warp of every CTA of the grid, whole; false when the budget is spent. Co-residency comes from the cooperative
// launch. `counter` starts at zero and is used once in a launch.
DEVICE bool sync_grid(const Params& p, u32* counter) {
    if (lane_idx() == 0) add_release_gpu(counter, 1);
    sync_warp();
    const u32 expected = num_blocks();
    const auto poll = [&] { return load_acquire_gpu(counter) == expected; };
    return poll() || poll_in_time(p, kWaitGridBarrier, 0, expected, poll);
}

// Every warp of a warpgroup executes it, once. kLaunchRegs is what the launch gave each thread.
template <u32 kRegs>
DEVICE void set_registers() {
    constexpr u32 kLaunchRegs = min_of(65536u / kNumThreads, 255u) / 8 * 8;
    if constexpr (kRegs < kLaunchRegs) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs));
    } else if constexpr (kRegs > kLaunchRegs) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs));
    }
}
