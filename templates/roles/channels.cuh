// Channels: a rank's tokens in order, as many on each. A channel's messages and sums go by one warp of the rank, and
// come by one warp of each rail peer, through memory and a tail of its own: no two warps wait for each other's turn.

struct Chunk {
    u32 begin, end;
};
DEVICE Chunk chunk_of_channels(const Params& p, u32 first, u32 num) {
    return {min_of(first * p.channel_tokens, p.num_tokens), min_of((first + num) * p.channel_tokens, p.num_tokens)};
}
DEVICE Chunk chunk_of_block(const Params& p) {
    return chunk_of_channels(p, block_idx() * kBlockChannels, kBlockChannels);
}

// As many on every rank: those of a rank with the most tokens.
DEVICE u32 num_channels(const Params& p) { return ceil_div(p.rank_tokens, p.channel_tokens); }

// How far `channel` from `from` is, on this rank: in the lower half messages so far, in the upper half their number in
// all and 1, or 0 while that is open. Whoever has seen the end leaves zero for the next launch, which writes only once
// this rank has entered it.
constexpr u32 kEndShift = 32;
DEVICE i64 tail_at(const Params& p, u32 from, u32 channel) {
    return p.rail_tails_at + (i64(from) * kMaxChannels + channel) * 8;
}
DEVICE u64* tail(const Params& p, u32 from, u32 channel) {
    return symmetric<u64>(p, p.rank, tail_at(p, from, channel));
}

// Adds to a channel's tail on `node`, after what the warp left there. One whole warp.
DEVICE void add_tail(const Params& p, u32 node, u32 channel, u64 value) {
    if (node != own_node(p)) return signal_add(p, node, tail_at(p, own_node(p), channel), value);
    sync_warp();
    if (lane_idx() == 0) add_release_sys(tail(p, node, channel), value);
}

// This rank has entered the launch: its rail peers may write to it. One whole warp. Pairs with rail_entered.
DEVICE void enter_rail(const Params& p, u32 node) { signal_add(p, node, p.rail_entered_at + own_node(p) * 8, 1); }

// Whether the rail peer on `node` has. Every launch adds one, whatever it does.
DEVICE bool rail_entered(const Params& p, u32 node) {
    const u64* launches = symmetric<u64>(p, p.rank, p.rail_entered_at) + node;
    return i32(u32(load_acquire_sys(launches)) - launch_number() - 1) >= 0;
}
