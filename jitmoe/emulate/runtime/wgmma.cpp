// Warpgroup matrix multiply-accumulate, asynchronous: it may read its operands and write its registers at any time
// between the commit and the wait.
#include <cmath>

#include "machine.h"

namespace emu {

constexpr u32 kRows = 16, kMaxN = 256, kDepth = 32;  // rows of a warp; bytes along k of an instruction

// The accumulators of a warp, out of the threads' registers while multiplies on them are in flight.
struct Accumulators {
    float c[kRows][kMaxN];
};

struct Operation {
    bool is_commit = false;
    AsyncAgent agent;  // of a commit: as it was for the group
    u32 n = 0;
    bool accumulate = false, is_bf16 = false;
    u64 a = 0, b = 0;
    const u32* registers[kWarpLanes] = {};  // of A, if it is not in shared memory
    bool a_is_in_registers = false;
    u32 num_lanes = 0;  // that have issued it
    float* d[kWarpLanes] = {};
    bool is_chained = false;  // continues on accumulators in flight
    std::shared_ptr<Accumulators> accumulators;
};

// What a warp has issued and not yet waited for.
struct WgmmaStream {
    u32 block, warp;
    std::deque<Operation> operations;
    u32 first = 0;     // position of operations.front()
    u32 executed = 0;  // position before which all are done
    AsyncAgent agent;  // reads the operands; an epoch is a group
};

bool wgmma_in_flight(const Warp& warp) { return warp.wgmma && !warp.wgmma->operations.empty(); }

static WgmmaStream& stream() {
    Warp& warp = machine.warp();
    if (!warp.wgmma) {
        warp.wgmma = std::make_shared<WgmmaStream>();
        warp.wgmma->block = machine.current->block;
        warp.wgmma->warp = machine.current->warp();
        warp.wgmma->agent = new_agent("wgmma");
    }
    return *warp.wgmma;
}

// "Thread t of a warp holds rows t / 4 (+ 8) and columns 8 j + 2 (t % 4) (+ 1)": registers 4 j .. 4 j + 3 are
// (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1).
static float& element(Accumulators& accumulators, u32 lane, u32 i) {
    return accumulators.c[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
}

static float decode_e4m3(u8 code) {
    const u32 exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? __builtin_ldexpf(8 + mantissa, int(exponent) - 10) : __builtin_ldexpf(mantissa, -9);
    if ((code & 0x7f) == 0x7f) value = __builtin_nanf("");
    return code & 0x80 ? -value : value;
}

// 32 bytes of row `row` of a K-major tile with the 128-byte swizzle. Descriptor: address / 16 in bits 0..13, bytes / 16
// between groups of 8 rows in bits 32..45, base offset in 49..51, swizzle mode in 62..63 (1: 128 bytes).
static const u8* operand_chunk(const Block& block, u64 descriptor, u32 row, u32 half) {
    const u32 start = u32(descriptor & 0x3fff) << 4, stride = u32(descriptor >> 32 & 0x3fff) << 4;
    const u32 linear = start + row / 8 * stride + row % 8 * 128 + half * 16;
    return block.shared + ((linear ^ ((linear >> 7 & 7) << 4)) - kSharedBase);
}

static void check_descriptor(u64 descriptor, u32 rows, const char* name) {
    const u32 start = u32(descriptor & 0x3fff) << 4, stride = u32(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) fail("wgmma: operand %s must have the 128-byte swizzle", name);
    if ((descriptor >> 49 & 7) != 0 || start % 1024 >= 128)
        fail("wgmma: operand %s starts inside a swizzle pattern", name);
    if (start < kSharedBase ||
        start + (rows / 8 - 1) * stride + 1024 - start % 1024 > kSharedBase + machine.shared_bytes) {
        fail("wgmma: operand %s (%s, %u rows) leaves shared memory", name, shared_name(start).c_str(), rows);
    }
}

// Operands of a multiply: 16 rows of A by the warp, all of B, by depth.
struct Operands {
    u8 a[kRows][kDepth], b[kDepth][kMaxN];
};

// "Thread t of a warp holds bytes 4 (t % 4) .. + 3 of row t / 4 in register 0, of row t / 4 + 8 in 1, and 16 bytes
// further on in 2 and 3." Read as late as the hardware may.
static u8 register_byte(const Operation& operation, u32 row, u32 k) {
    const u32 lane = row % 8 * 4 + k % 16 / 4;
    return u8(operation.registers[lane][row / 8 + k / 16 * 2] >> k % 4 * 8);
}

static const Operands& load_operands(const WgmmaStream& stream, const Operation& operation) {
    static Operands operands;
    const Block& block = machine.blocks[stream.block];
    for (u32 k = 0; k < kDepth; ++k) {
        for (u32 r = 0; r < kRows; ++r) {
            operands.a[r][k] = operation.a_is_in_registers
                                   ? register_byte(operation, r, k)
                                   : operand_chunk(block, operation.a, stream.warp % 4 * kRows + r, k / 16)[k % 16];
        }
        for (u32 column = 0; column < operation.n; ++column) {
            operands.b[k][column] = operand_chunk(block, operation.b, column, k / 16)[k % 16];
        }
    }
    return operands;
}

// Products of e4m3 are exact in double, and so is their sum; it is rounded to fp32 once.
static void multiply_exactly(const Operands& operands, u32 n, bool accumulate, Accumulators& accumulators) {
    static double value[256];
    if (value[1] == 0) {
        for (u32 code = 0; code < 256; ++code) value[code] = decode_e4m3(u8(code));
    }
    static double b[kDepth][kMaxN];
    for (u32 k = 0; k < kDepth; ++k) {
        for (u32 column = 0; column < n; ++column) b[k][column] = value[operands.b[k][column]];
    }
    for (u32 r = 0; r < kRows; ++r) {
        double sums[kMaxN];
        float* c = accumulators.c[r];
        for (u32 column = 0; column < n; ++column) sums[column] = accumulate ? c[column] : 0.0f;
        for (u32 k = 0; k < kDepth; ++k) {
            const double a = value[operands.a[r][k]];
            for (u32 column = 0; column < n; ++column) sums[column] += a * b[k][column];
        }
        for (u32 column = 0; column < n; ++column) c[column] = float(sums[column]);
    }
}

// What an H200 does, found by comparing 300,000 sums bit for bit: the 32 products and the accumulator are aligned to
// the largest exponent among them, a product's being the sum of its factors' (-6 for subnormals); 13 bits after the
// leading one are kept of each, and of their sum; the rest is cut off.
static void multiply_as_hardware(const Operands& operands, u32 n, bool accumulate, Accumulators& accumulators) {
    constexpr int kFraction = 13, kNone = -100000;
    struct Parts {
        int mantissa, exponent;  // value = mantissa * 2^(exponent - 3)
    };
    static Parts parts[256];
    if (parts[1].mantissa == 0) {
        for (u32 code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, mantissa = int(code & 7) + (exponent ? 8 : 0);
            parts[code] = {code & 0x80 ? -mantissa : mantissa, (exponent ? exponent : 1) - 7};
        }
    }
    const auto exponent_of = [](double x) { return x == 0 ? kNone : std::ilogb(x); };
    for (u32 r = 0; r < kRows; ++r) {
        for (u32 column = 0; column < n; ++column) {
            float& c = accumulators.c[r][column];
            const double before = accumulate ? c : 0.0f;
            bool is_nan = !std::isfinite(before);
            int top = exponent_of(before);
            for (u32 k = 0; k < kDepth; ++k) {
                const u8 code_a = operands.a[r][k], code_b = operands.b[k][column];
                const Parts a = parts[code_a], b = parts[code_b];
                is_nan = is_nan || (code_a & 0x7f) == 0x7f || (code_b & 0x7f) == 0x7f;
                if (a.mantissa * b.mantissa != 0 && a.exponent + b.exponent > top) top = a.exponent + b.exponent;
            }
            i64 units = i64(std::ldexp(before, kFraction - top));
            for (u32 k = 0; k < kDepth; ++k) {
                const Parts a = parts[operands.a[r][k]], b = parts[operands.b[k][column]];
                const int shift = top - (a.exponent + b.exponent) - (kFraction - 6);
                const int product = a.mantissa * b.mantissa;
                units += shift <= 0 ? product * (1 << -shift) : shift < 16 ? product / (1 << shift) : 0;
            }
            const int spare = units == 0 ? 0 : exponent_of(double(units)) - kFraction;
            if (spare > 0) units = units / (1 << spare) * (1 << spare);
            c = is_nan ? __builtin_nanf("") : float(std::ldexp(double(units), top - kFraction));
        }
    }
}

// Of bf16, 16 deep, added up in double and rounded to fp32 once.
static void multiply_bf16(const Operands& operands, u32 n, bool accumulate, Accumulators& accumulators) {
    const auto decode = [](u8 low, u8 high) {
        const u32 bits = u32(high) << 24 | u32(low) << 16;
        float value;
        __builtin_memcpy(&value, &bits, sizeof value);
        return double(value);
    };
    static double b[kDepth / 2][kMaxN];
    for (u32 k = 0; k < kDepth / 2; ++k) {
        for (u32 column = 0; column < n; ++column) {
            b[k][column] = decode(operands.b[2 * k][column], operands.b[2 * k + 1][column]);
        }
    }
    for (u32 r = 0; r < kRows; ++r) {
        double sums[kMaxN];
        float* c = accumulators.c[r];
        for (u32 column = 0; column < n; ++column) sums[column] = accumulate ? c[column] : 0.0f;
        for (u32 k = 0; k < kDepth / 2; ++k) {
            const double a = decode(operands.a[r][2 * k], operands.a[r][2 * k + 1]);
            for (u32 column = 0; column < n; ++column) sums[column] += a * b[k][column];
        }
        for (u32 column = 0; column < n; ++column) c[column] = float(sums[column]);
    }
}

static void multiply(const WgmmaStream& stream, const Operation& operation) {
    if (operation.is_bf16 && machine.hardware_sums) fail("wgmma: how an H200 cuts sums of bf16 off is not known");
    const auto how = operation.is_bf16       ? multiply_bf16
                     : machine.hardware_sums ? multiply_as_hardware
                                             : multiply_exactly;
    how(load_operands(stream, operation), operation.n, operation.accumulate, *operation.accumulators);
}

static void execute(WgmmaStream& stream, u32 end) {
    for (; stream.executed < end; ++stream.executed) {
        const Operation& operation = stream.operations[stream.executed - stream.first];
        if (!operation.is_commit) multiply(stream, operation);
    }
}

// The next operation of the running lane: new in its warp's stream, or there by another lane and then the same.
static Operation& issue(const Operation& wanted) {
    Fiber* self = machine.current;
    WgmmaStream& s = stream();
    const u32 idx = self->wgmma_position++ - s.first;
    if (idx == s.operations.size()) s.operations.push_back(wanted);
    Operation& o = s.operations[idx];
    if (o.is_commit != wanted.is_commit || o.n != wanted.n || o.accumulate != wanted.accumulate || o.a != wanted.a ||
        o.b != wanted.b || o.is_bf16 != wanted.is_bf16 || o.a_is_in_registers != wanted.a_is_in_registers) {
        fail("wgmma: lanes of a warp issue different operations");
    }
    o.num_lanes += 1;
    return o;
}

// "All warps of the warpgroup must execute the same wgmma.mma_async."
static void log_call(const Operation& o) {
    const Fiber* self = machine.current;
    WarpgroupLog& log = machine.block().warpgroups[self->warp() / 4];
    const u32 idx = log.made[self->warp() % 4]++ - log.first;
    if (idx == log.calls.size()) log.calls.push_back({o.n, o.accumulate, o.a, o.b});
    const WarpgroupLog::Call& call = log.calls[idx];
    if (call.n != o.n || call.accumulate != o.accumulate || call.a != o.a || call.b != o.b) {
        fail("wgmma: warps of a warpgroup issue different multiplies (n %u and %u)", call.n, o.n);
    }
    u32 least = log.made[0];
    for (u32 made : log.made) least = made < least ? made : least;
    for (; log.first < least; ++log.first) log.calls.pop_front();
}

// The warp reads its 16 rows of A and all of B.
static void check_operands(const Operation& o, const void* at) {
    if (!machine.checked) return;
    const Fiber* self = machine.current;
    const AsyncAgent& agent = stream().agent;
    for (u32 half = 0; half < 2; ++half) {
        for (u32 r = 0; r < kRows && !o.a_is_in_registers; ++r) {
            const u8* chunk = operand_chunk(machine.block(), o.a, self->warp() % 4 * kRows + r, half);
            check_async_access(agent, chunk, 16, Access::kRead, kAsyncSharedView, at);
        }
        for (u32 column = 0; column < o.n; ++column) {
            const u8* chunk = operand_chunk(machine.block(), o.b, column, half);
            check_async_access(agent, chunk, 16, Access::kRead, kAsyncSharedView, at);
        }
    }
}

void wgmma_fence() {
    maybe_switch();
    machine.current->wgmma_fenced = true;
}

// A is at descriptor `a`, or in this lane's `registers`.
static void start_multiply(float* d, u32 n, bool accumulate, bool is_bf16, u64 a, const u32* registers, u64 b,
                           const void* at) {
    maybe_switch();
    Fiber* self = machine.current;
    if (!registers) check_descriptor(a, 64, "A");
    check_descriptor(b, n, "B");
    Operation wanted;
    wanted.n = n;
    wanted.accumulate = accumulate;
    wanted.is_bf16 = is_bf16;
    wanted.a = a;
    wanted.a_is_in_registers = registers != nullptr;
    wanted.b = b;
    Operation& o = issue(wanted);
    if (o.num_lanes == 1) {
        log_call(o);
        check_operands(o, at);
    }
    // "Accesses to the accumulators are undefined until the wait; further multiplies of the same shape on them need no
    // fence." The values move out of the registers, which are poison meanwhile.
    Operation* chained = nullptr;
    for (Operation& other : stream().operations) {
        if (&other == &o) break;
        if (other.d[self->lane()] == d) chained = &other;
    }
    if (!o.accumulators) {
        o.accumulators = chained ? chained->accumulators : std::make_shared<Accumulators>();
        o.is_chained = chained != nullptr;
    }
    if (o.is_chained != (chained != nullptr) || (chained && chained->accumulators != o.accumulators)) {
        fail("wgmma: lanes disagree on which accumulators are in flight");
    }
    o.d[self->lane()] = d;
    o.registers[self->lane()] = registers;
    if (chained && !registers) return;
    if (!self->wgmma_fenced) fail("wgmma on registers that were used since the last wgmma.fence");
    for (u32 i = 0; i < n / 2 && !chained; ++i) {
        if (accumulate) element(*o.accumulators, self->lane(), i) = d[i];
        d[i] = __builtin_nanf("");
    }
}

void wgmma(float* d, u32 n, bool accumulate, u64 a, u64 b) {
    start_multiply(d, n, accumulate, false, a, nullptr, b, __builtin_return_address(0));
}

void wgmma_bf16(float* d, u32 n, u64 a, u64 b) {
    start_multiply(d, n, true, true, a, nullptr, b, __builtin_return_address(0));
}

void wgmma_registers(float* d, u32 n, bool accumulate, bool is_bf16, const u32* a, u64 b) {
    start_multiply(d, n, accumulate, is_bf16, 0, a, b, __builtin_return_address(0));
}

void wgmma_commit() {
    maybe_switch();
    Operation wanted;
    wanted.is_commit = true;
    Operation& commit = issue(wanted);
    if (commit.num_lanes == 1) {
        commit.agent = stream().agent;
        stream().agent.epoch += 1;
    }
    if (commit.num_lanes != kWarpLanes) return;
    const u32 end = machine.current->wgmma_position;
    stream();
    const auto shared = machine.warp().wgmma;
    later(machine.max_delay, [shared, end] { execute(*shared, end); });
}

// "wait_group N: wait until N or fewer of the most recent groups are pending and all prior groups are complete."
static void finish_wait(Block&, Warp& warp, Fiber* lanes) {
    WgmmaStream& s = *warp.wgmma;
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
        if (lanes[lane].wgmma_position != lanes[0].wgmma_position)
            fail("wgmma.wait_group: lanes have issued different operations");
        lanes[lane].wgmma_fenced = false;
    }
    u32 keep = 0, num_newer = 0;  // operations after the last one waited for
    for (u32 idx = s.operations.size(); idx > 0; --idx, ++keep) {
        if (s.operations[idx - 1].is_commit && num_newer++ == warp.collective.argument) break;
    }
    execute(s, s.first + s.operations.size() - keep);
    for (; s.operations.size() > keep; s.operations.pop_front(), ++s.first) {
        const Operation& o = s.operations.front();
        if (machine.checked && o.is_commit) {
            Clocks read;
            release_async(o.agent, false, read);
            const SharedClocks group = share(std::move(read));
            for (u32 lane = 0; lane < kWarpLanes; ++lane) acquire(lanes[lane], group);
        }
        bool last = !o.is_commit;
        for (u32 idx = 1; idx < s.operations.size(); ++idx)
            last = last && s.operations[idx].accumulators != o.accumulators;
        if (!last) continue;
        machine.counters.wgmmas += 1;
        for (u32 lane = 0; lane < kWarpLanes; ++lane) {
            for (u32 i = 0; i < o.n / 2; ++i) o.d[lane][i] = element(*o.accumulators, lane, i);
        }
    }
}

void wgmma_wait(u32 num_newest) {
    stream();
    meet("wgmma.wait_group", kAllLanes, num_newest, 0, {}, finish_wait);
}

}  // namespace emu
