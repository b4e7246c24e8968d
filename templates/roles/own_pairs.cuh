// The caller's routing: ids and weights of the tokens that lie on this rank.

DEVICE u64 own_id(const Params& p, u64 pair) {
    return p.ids_are_i64 ? reinterpret_cast<const u64*>(p.topk_ids)[pair]
                         : u64(reinterpret_cast<const u32*>(p.topk_ids)[pair]);
}

DEVICE float own_weight(const Params& p, u64 pair) {
    return p.weights_are_bf16 ? bf16_low(reinterpret_cast<const u16*>(p.topk_weights)[pair])
                              : reinterpret_cast<const float*>(p.topk_weights)[pair];
}
