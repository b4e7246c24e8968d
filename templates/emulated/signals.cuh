// Words that other GPUs or a network card change: counters of 64 bits and masks, in system scope. Relies on types.cuh.

DEVICE u64 load_acquire_sys(const u64* address) { return emu::load(address, emu::kAcquire, emu::kSys); }

DEVICE void store_relaxed_sys(u64* address, u64 value) { emu::store(address, value, emu::kRelaxed, emu::kSys); }

DEVICE void add_release_sys(u64* address, u64 value) { emu::fetch_add(address, value, emu::kRelease, emu::kSys); }

DEVICE void or_release_sys(u32* address, u32 bits) { emu::fetch_or(address, bits, emu::kRelease, emu::kSys); }
