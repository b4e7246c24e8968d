// Which of the experts here an id of two words means. One outside [0, kNumExperts), less the first expert's, marks an
// unused slot; as unsigned it is never below kNumExperts.
DEVICE u32 expert_of_id(const Params& p, u32 low, u32 high) {
    return high == 0 ? min_of(low - p.first_expert, kNumExperts) : kNumExperts;
}
