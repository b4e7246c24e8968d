// One rank: pairs and tokens are there.

DEVICE void bring_pairs(const Params&, Smem&, const Head&) {}
DEVICE void wait_for_tokens(const Params&, Smem&) {}

// Many ranks: see exchange.cuh. Named where the head branches on kNumRanks.
constexpr u32 kFetchBatch = 1;
template <typename Store, typename StoreScale>
DEVICE void fetch_token(const Params&, u32, Store, StoreScale) {}

// What GEMM 2 must know of a row: the slots of its token that hold experts.
DEVICE u32 row_use(const Params& p, u32 pair) { return used_slots(p, pair / kTopK); }
