// Ranks whose memory this one reaches by loads and stores: those of its node.

constexpr u32 kDomainRanks = kNodeRanks;
DEVICE u32 own_node(const Params& p) { return p.rank / kNodeRanks; }
DEVICE u32 first_of_domain(const Params& p) { return own_node(p) * kNodeRanks; }

// The rank on `node` that this one sends to and hears from.
DEVICE u32 rail_rank(const Params& p, u32 node) { return node * kNodeRanks + p.rank % kNodeRanks; }
