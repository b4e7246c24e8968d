// The dispatch warps: a token each, from x through shared memory to all its rows. Rows go to a rank when all ranks have
// told their counts: then each has come so far in its stream that nobody reads the rows of the launch before.

DEVICE void role_dispatch(const Params& p, Smem& smem, const Head&) {
    const Chunk chunk = chunk_of_block(p);
    const u32 warp = warp_idx() - kDispatchWarpBegin;
    RowRing ring, loading;
    u32 next = chunk.begin + warp;  // the token to be loaded
    for (u32 i = 0; i + 1 < kNumRowBuffers && next < chunk.end; ++i, next += kNumDispatchWarps, loading.advance()) {
        load_row(p, smem, warp, next, loading);
    }
    wait_for_places(smem);
    for (u32 token = chunk.begin + warp; token < chunk.end; token += kNumDispatchWarps, ring.advance()) {
        wait_for_stores_read<0>();
        sync_warp();
        if (next < chunk.end) load_row(p, smem, warp, next, loading);
        next += kNumDispatchWarps;
        loading.advance();
        wait_for_row(p, smem, warp, token, ring);
        const uint2 place = load_place(p.places, token);
        const bool is_first = is_first_on_rank(place);
        const bool stores = kExpertRows ? place.x != kNoPlace : is_first;
        if (stores) store_bulk(row_on(p, rank_of_place(place), place.y), row_buffer(smem, warp, ring), kRowBytes);
        commit_stores();
        if constexpr (kNumGroups > 0) {
            store_row_scales(p, place, __ballot_sync(kFullMask, stores),
                             [&](u32 group) { return scale_of_row(p, smem, warp, token, group); });
            sync_warp();  // the next token's scales may be written
        }
        const u32 firsts = __ballot_sync(kFullMask, is_first);
        if (!p.is_cached) store_records(p, sent_from_here(p, token, place), firsts);
    }
    wait_for_stores<0>();
}
