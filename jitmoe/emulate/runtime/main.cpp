// One launch, or several in streams: the job comes as words on standard input, arrays lie in a file that
// Python made; the report goes to standard output. Exit codes: 0 done, 2 bad job, 3 stall, 4 the kernel broke a rule, 5
// waits gave up after a stall.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <iostream>

#include "machine.h"

// Behind the kernel text: see jitmoe/emulate/compile.py.
extern "C" void emu_kernel(const void* params);
extern "C" const emu::u32 emu_params_bytes, emu_checked;

namespace emu {

static const u64 kPage = 4096;

static u8* map_region(int file, u64 offset, u64 num_bytes, bool writable) {
    u8* space = static_cast<u8*>(mmap(nullptr, num_bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    const int flags = MAP_FIXED | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    void* at = mmap(space + kPage, num_bytes, protection, flags, file, i64(offset));
    if (space == MAP_FAILED || at == MAP_FAILED) {
        std::perror("mmap");
        std::exit(2);
    }
    return space + kPage;
}

// Random bytes, so that what nobody initialised has many values; a launch finds what others left.
static void make_block(Block& block) {
    const u64 num_bytes = (machine.shared_bytes + kPage - 1) / kPage * kPage;
    block.shared = map_region(-1, 0, num_bytes, true) + (num_bytes - machine.shared_bytes);
    for (u32 i = 0; i + 8 <= machine.shared_bytes; i += 8) {
        const u64 garbage = machine.random.next();
        std::memcpy(block.shared + i, &garbage, 8);
    }
    block.warps.resize(machine.num_threads / kWarpLanes);
    block.warpgroups.resize((block.warps.size() + 3) / 4);
    block.num_live = machine.num_threads;
}

static void on_fault(int, siginfo_t* info, void*) {
    const u8* at = static_cast<const u8*>(info->si_addr);
    for (const Region& region : machine.regions) {
        if (at < region.begin - kPage || at >= region.begin + region.num_bytes + kPage) continue;
        fail("access at byte %lld of %s, which has %llu%s", i64(at - region.begin), region.name.c_str(),
             region.num_bytes, region.writable ? "" : " and is an input");
    }
    for (u32 b = 0; b < machine.num_blocks; ++b) {
        const i64 offset = at - machine.blocks[b].shared;
        if (offset < -i64(kPage) || offset >= i64(machine.shared_bytes + kPage)) continue;
        fail("access at byte %lld of the shared memory of %s, which has %u", offset, block_name(b).c_str(),
             machine.shared_bytes);
    }
    fail("access at %p, which is no memory of this launch", info->si_addr);
}

static u32 stream_index(u32 number) {
    u32 index = 0;
    while (index < machine.streams.size() && machine.streams[index].number != number) index += 1;
    if (index == machine.streams.size()) machine.streams.push_back({number});
    return index;
}

static int run() {
    int file = -1;
    std::string word;
    while (std::cin >> word) {
        if (word == "blocks") {
            std::cin >> machine.num_threads >> machine.shared_bytes >> machine.cluster_size;
        } else if (word == "grid") {  // stream, blocks, parameters; what follows is its
            Grid grid{machine.num_blocks};
            grid.params = {std::aligned_alloc(64, (emu_params_bytes + 63) / 64 * 64), std::free};
            u32 stream;
            std::string hex;
            std::cin >> stream >> grid.num_blocks >> hex;
            if (hex.size() != 2 * emu_params_bytes || grid.num_blocks % machine.cluster_size != 0) return 2;
            u8* params = static_cast<u8*>(grid.params.get());
            for (u32 i = 0; i < emu_params_bytes; ++i) params[i] = u8(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
            machine.num_blocks += grid.num_blocks;
            grid.stream = stream_index(stream);
            std::vector<u32>& grids = machine.streams[grid.stream].grids;
            grid.launch = u32(grids.size());
            grids.push_back(u32(machine.grids.size()));
            machine.grids.push_back(grid);
        } else if (word == "seed") {
            std::cin >> machine.seed >> machine.expire;
        } else if (word == "delays") {
            machine.delays = true;
        } else if (word == "kill") {  // stream, step
            u32 stream;
            std::cin >> stream >> machine.killed_at;
            machine.killed_stream = stream_index(stream);
        } else if (word == "hardware_sums") {
            machine.hardware_sums = true;
        } else if (word == "file") {
            std::cin >> word;
            file = open(word.c_str(), O_RDWR);
        } else if (word == "region") {  // name, offset in the file, bytes mapped, bytes before the array, bytes of it
            Region region;
            u64 offset, mapped;
            std::cin >> region.name >> offset >> mapped >> region.lead >> region.num_bytes >> region.writable;
            region.begin = map_region(file, offset, mapped, region.writable) + region.lead;
            machine.regions.push_back(region);
        } else if (word == "late") {  // of the grid: to this region, from this offset in the file
            u32 number;
            u64 offset;
            std::cin >> number >> offset;
            Region& region = machine.regions.at(number);
            region.is_late = true;
            Late late{number, std::vector<u8>(region.num_bytes)};
            if (pread(file, late.contents.data(), region.num_bytes, offset) != i64(region.num_bytes)) return 2;
            machine.grids.back().late.push_back(late);
        } else if (word == "pointer") {  // at this offset of the grid's parameters, to this region
            u32 offset, region;
            std::cin >> offset >> region;
            std::memcpy(static_cast<u8*>(machine.grids.back().params.get()) + offset, &machine.regions.at(region).begin,
                        8);
        } else if (word == "address") {  // in this region at this byte, of that region
            u32 table, offset, region;
            std::cin >> table >> offset >> region;
            std::memcpy(machine.regions.at(table).begin + offset, &machine.regions.at(region).begin, 8);
        } else if (word == "shared") {
            SharedRegion region;
            std::cin >> region.name >> region.offset >> region.num_bytes >> region.count;
            machine.shared_regions.push_back(region);
        } else if (word == "role") {
            RoleRange role;
            std::cin >> role.name >> role.begin >> role.end;
            machine.roles.push_back(role);
        } else {
            std::cerr << "unknown word in the job: " << word << "\n";
            return 2;
        }
    }
    static u8 signal_stack[64 << 10];
    stack_t stack{};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);

    machine.checked = emu_checked != 0;
    machine.random.state = machine.seed ^ 0x5eed;
    machine.blocks.resize(machine.num_blocks);
    for (Block& block : machine.blocks) make_block(block);
    for (u32 number = 0; number < machine.grids.size(); ++number) {
        const Grid& grid = machine.grids[number];
        for (u32 i = 0; i < grid.num_blocks; ++i) machine.blocks[grid.first_block + i].grid = number;
    }
    start(emu_kernel);
    print_garbage();
    const Counters& c = machine.counters;
    std::printf("done: %llu steps, %llu switches, %llu accumulator tiles, %llu tile bytes\n", machine.step, c.switches,
                c.wgmmas, c.tile_bytes);
    return machine.has_expired ? 5 : 0;
}

}  // namespace emu

int main() { return emu::run(); }
