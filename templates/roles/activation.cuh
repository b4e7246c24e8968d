// The activation between the GEMMs (jitmoe/plan/variant.py), of the sums of one channel and token: of gate and up, or
// without a gate of one sum. Of gate alone, most functions are gate * sigmoid(some z): one exponential and one
// reciprocal of the special-function unit.

DEVICE float sigmoid(float z) { return reciprocal_approx(1.0f + exp2_approx(-1.4426950408889634f * z)); }

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3), and (1 + tanh(u)) / 2 = sigmoid(2u).
DEVICE float gelu_tanh(float x) { return x * sigmoid(x * fmaf(0.07135481627f, x * x, 1.5957691216f)); }

DEVICE float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(0.70710678119f * x)); }

// The same without the registers of erff, for twice as many channels: x less |x| times the tail of the normal
// distribution beyond |x|, which M. Abramowitz and I. Stegun, 26.2.17, have within 8e-8.
DEVICE float gelu_erf_short(float x) {
    const float t = reciprocal_approx(fmaf(0.2316419f, fabsf(x), 1.0f));
    float sum = fmaf(t, 0.5307027145f, -0.7265760135f);
    sum = fmaf(t, sum, 0.7107068705f);
    sum = fmaf(t, sum, -0.142248368f);
    sum = fmaf(t, sum, 0.127414796f);
    return fmaf(-fabsf(x), t * sum * exp2_approx(-0.72134752044f * x * x), max_or_nan(x, 0.0f));
}

DEVICE float relu2(float x) {
    const float positive = max_or_nan(x, 0.0f);
    return positive * positive;
}

static_assert(kActivation <= kActivationGeluErfNoGate, "there is no such activation");

// Of the first and the second half of w13's rows: everywhere else the first half is called gate, whatever it is.
// `second` is not looked at without a gate, nor the router weight unless it multiplies the token; where there are
// biases, add_bias has done that.
DEVICE float activate(const Params& p, float first, float second, float weight) {
    if constexpr (kWeightOnInput && !kHasBias) {
        first *= weight;
        second *= weight;
    }
    const float gate = kUpFirst ? second : first, up = kUpFirst ? first : second;
    if constexpr (kActivation == kActivationSwiglu) {
        return silu(gate) * up;
    } else if constexpr (kActivation == kActivationSwigluClamped) {
        const float cut = min_or_nan(gate, p.limit);
        const float cut_up = max_or_nan(min_or_nan(up, p.limit), -p.limit);
        return cut * sigmoid(p.alpha * cut) * (cut_up + p.up_offset);
    } else if constexpr (kActivation == kActivationGegluTanh) {
        return gelu_tanh(gate) * up;
    } else if constexpr (kActivation == kActivationGegluErf) {
        return gelu_erf(gate) * up;
    } else if constexpr (kActivation == kActivationReglu2) {
        return relu2(gate) * up;
    } else if constexpr (kActivation == kActivationRelu2NoGate) {
        return relu2(first);
    } else if constexpr (kActivation == kActivationSiluNoGate) {
        return silu(first);
    } else if constexpr (kActivation == kActivationGeluTanhNoGate) {
        return gelu_tanh(first);
    } else {
        return gelu_erf_short(first);
    }
}

// Scale of a row's group of 128 channels between the GEMMs, as quant_scale has it. The router weight, unless it
// multiplied the token, and routed_scaling_factor ride on it: factors of the whole row, exact but for a rounding each.
DEVICE float mid_scale(const Params& p, float amax, float weight) {
    const float scale = fmaxf(amax, 1e-10f) * p.mid_scale_unit;
    return kWeightOnInput ? scale : scale * weight;
}
