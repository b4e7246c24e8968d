// What may befall a stream, that is a rank: it is held back now and then for long, so that ranks drift apart, or ends
// for ever. What its copies have under way lands all the same. Links between ranks have no delay: a store, unless it is
// a bulk store or a put (rail.cpp), is in a peer's memory at once, and who reads it there without a release and an
// acquire is found by the checked build alone.
#include <utility>

#include "machine.h"

namespace emu {

// Holds may outlast launches: who waits for the stream meanwhile lets the clock jump.
constexpr u32 kMinHold = 8, kMaxHold = 22;  // log2 of steps
constexpr u32 kMaxRun = 18;

static void let_go(Stream& stream) {
    stream.is_held = false;
    stream.runs_until = machine.step + machine.random.below(1u << machine.random.below(kMaxRun));
    for (Fiber* fiber : std::exchange(stream.held, {})) make_ready(fiber);
}

static void hold(Stream& stream) {
    if (stream.is_held || machine.expired) return;  // while time flies a hold would take hours
    stream.is_held = true;
    later(1u << (kMinHold + machine.random.below(kMaxHold - kMinHold)), [&] { let_go(stream); });
}

void hold_at_random(Stream& stream) {
    if (machine.delays && machine.random.one_in(2)) hold(stream);
}

void start_delays() {
    if (!machine.delays) return;
    for (Stream& stream : machine.streams) {
        stream.runs_until = machine.random.below(1u << machine.random.below(kMaxRun));
        hold_at_random(stream);
    }
}

// Threads of a stream are held as their turns come.
bool keeps(Fiber* fiber) {
    if (fiber->state == Fiber::kKilled) return true;
    if (!machine.delays) return false;
    Stream& stream = machine.stream_of(*fiber);
    if (machine.step >= stream.runs_until) hold(stream);
    if (stream.is_held) stream.held.push_back(fiber);
    return stream.is_held;
}

void kill_stream() {
    Stream& stream = machine.streams[machine.killed_stream];
    machine.killed_at = ~0ull;
    stream.is_killed = true;
    u32 num_killed = 0;
    for (Fiber& fiber : machine.fibers) {
        if (&machine.stream_of(fiber) != &stream || fiber.is_over()) continue;
        fiber.state = Fiber::kKilled;
        num_killed += 1;
    }
    machine.num_exited += num_killed;
    machine.progress += 1;
    std::printf("rank %u was killed at step %llu: %u of its threads had not ended\n", stream.number, machine.step,
                num_killed);
}

}  // namespace emu
