// A network card for each rank. A put reads its source some time later and writes its target another time later, in no
// order with others; a signal is added once the puts before it, of the same warp to the same node, have landed. Who
// flushes, or acquires a signal, may find that all that happens only then. Nothing waits for what has been sent: it
// lands though the launch may be over, or the rank dead.
#include "machine.h"

namespace emu {

#define HERE __builtin_return_address(0)

// With delays, now and then: log2 of steps.
constexpr u32 kMinLong = 8, kMaxLong = 22;

struct Put {
    const u8* from;
    u8* to;
    u32 num_bytes;
    const Stream* sender;
    bool is_read, is_written;
    std::vector<u8> bytes;  // between the two
};

// Of a warp to a node.
struct PutsToNode {
    std::vector<std::shared_ptr<Put>> puts;
    AsyncAgent writer;  // an epoch is from signal to signal
};

// Of a warp.
struct Puts {
    std::vector<std::shared_ptr<Put>> unread;  // for all that the warp knows
    AsyncAgent reader;
    std::map<u32, PutsToNode> to_nodes;
};

static u32 delay() {
    const bool is_long = machine.delays && !machine.expired && machine.random.one_in(4);
    return is_long ? 1u << (kMinLong + machine.random.below(kMaxLong - kMinLong)) : machine.max_delay;
}

// What a killed rank has not read by then is never sent.
static void read_source(Put& put) {
    if (put.is_read || put.sender->is_killed) return;
    put.bytes.assign(put.from, put.from + put.num_bytes);
    put.is_read = true;
}

static void write_target(Put& put) {
    if (put.is_written || !put.is_read) return;
    std::memcpy(put.to, put.bytes.data(), put.num_bytes);
    put.bytes = {};
    put.is_written = true;
    machine.progress += 1;
}

static Puts& puts_of_warp() {
    std::shared_ptr<Puts>& puts = machine.warp().puts;
    if (!puts) {
        puts = std::make_shared<Puts>();
        puts->reader = new_agent("a put");
    }
    return *puts;
}

static PutsToNode& puts_to(u32 own_node, u32 node, const char* what) {
    if (node == own_node) fail("%s to node %u, which is the own", what, node);
    PutsToNode& to = puts_of_warp().to_nodes[node];
    if (to.writer.epoch == 0) to.writer = new_agent(kPut);
    return to;
}

void put_rail(u32 own_node, u32 node, void* to, const void* from, u32 num_bytes) {
    maybe_switch();
    PutsToNode& puts = puts_to(own_node, node, "a put");
    if (num_bytes % 16 != 0) fail("a put of %u bytes: not a multiple of 16", num_bytes);
    if (num_bytes == 0) return;
    check_global(from, num_bytes, 16, false, "put");
    check_global(to, num_bytes, 16, true, "put");
    check_async_access(puts_of_warp().reader, from, num_bytes, Access::kRead, kGenericView, HERE);
    check_put(puts.writer, to, num_bytes, Access::kWrite, HERE);
    const Stream* sender = &machine.stream_of(*machine.current);
    const Put issued{static_cast<const u8*>(from), static_cast<u8*>(to), num_bytes, sender};
    const auto put = std::make_shared<Put>(issued);
    puts.puts.push_back(put);
    puts_of_warp().unread.push_back(put);
    std::memset(to, 0xff, num_bytes);  // poison until the bytes land
    later(delay(), [=] {
        read_source(*put);
        later(delay(), [=] { write_target(*put); });
    });
}

// The signals of a warp are in no order either.
void signal_rail(u32 own_node, u32 node, u64* word, u64 value) {
    maybe_switch();
    PutsToNode& to = puts_to(own_node, node, "a signal");
    check_global(word, 8, 8, true, "signal");
    check_put(to.writer, word, 8, Access::kAtomicStore, HERE);
    Message message;
    release_put(to.writer, message);
    to.writer.epoch += 1;
    const Fiber& self = *machine.current;
    const auto land = [=, puts = to.puts, from_block = self.block] {
        for (const auto& put : puts) write_target(*put);
        land_message(word, from_block, message);
        *word += value;
        wake_pollers(false, word);
    };
    later(delay(), [=, puts = to.puts, sender = &machine.stream_of(self)] {
        if (sender->is_killed) return;
        for (const auto& put : puts) read_source(*put);
        later(delay(), land);
    });
}

// Until the card has read the sources of all puts of the warp.
void flush_rail() {
    maybe_switch();
    Puts& puts = puts_of_warp();
    for (const auto& put : puts.unread) read_source(*put);
    puts.unread.clear();
    Clocks read;
    release_async(puts.reader, false, read);
    acquire(*machine.current, share(std::move(read)));
    puts.reader.epoch += 1;
}

// No other warp can wait for them.
bool may_read_source(const Warp& warp) { return warp.puts && !warp.puts->unread.empty(); }

}  // namespace emu
