// Tokens that lie one after the other; a CTA's share, as many for each.

struct Chunk {
    u32 begin, end;
};
DEVICE Chunk chunk_of_block(const Params& p) {
    const u32 share = ceil_div(p.num_tokens, num_blocks());
    const u32 begin = min_of(share * block_idx(), p.num_tokens);
    return {begin, min_of(begin + share, p.num_tokens)};
}
