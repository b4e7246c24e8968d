"""The oracle: the whole layer in plain array arithmetic, for NumPy and (as `xp`) CuPy.

Slow and obvious. Also the two measures of error that results are judged by, and makers of random
layers and tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jitmoe import quantize
from jitmoe.fp8 import dequantize_tokens, quantize_tokens, round_bf16, to_float
from jitmoe.plan.formats import format_of
from jitmoe.plan.variant import Activation, check_gate_up
from jitmoe.reference_activations import activate, split
from jitmoe.reference_weights import expert_weights

ROUTINGS = ("uniform", "zipf", "hot_expert", "one_expert", "unused", "duplicates")
OUTLIER_FACTOR = 30.0


def mega_moe(
    x,
    x_scale,
    topk_ids,
    topk_weights,
    w13,
    w13_scale,
    w2,
    w2_scale,
    *,
    requantize: bool,
    gate_up: str = "gate_first",
    activation: Activation | str = "swiglu",
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    first_expert: int = 0,
    w13_bias=None,
    w2_bias=None,
    format: str | None = None,
    xp=np,
):
    """y[t] = factor * sum over slots s of topk_weights[t, s] * mid @ w2[e].T

    with e = topk_ids[t, s] - first_expert, mid = activate(gate, up, activation), by default
    silu(gate) * up, or without a gate activate(w13[e] @ x[t], None, activation), and factor =
    routed_scaling_factor (DeepSeek-V3, inference/model.py, Gate: it multiplies the router weights).
    With apply_router_weight_on_input, topk_weights[t, s] multiplies the token instead, and by that
    gate and up (Llama 4, modeling_llama4.py of transformers, Llama4TextMoe). Biases are added to
    gate and up so multiplied, and to mid @ w2[e].T before it is weighted (gpt-oss, MLPBlock).

    x             [num_tokens, hidden] e4m3; or float or bf16 bits, with x_scale None, which
                  `quantize_tokens` then quantises, unless the format multiplies in bf16
    x_scale       [num_tokens, hidden/128], [num_tokens], [num_tokens, 1], [1] or []
    topk_ids      [num_tokens, top_k] integers; a slot whose e is outside [0, num_experts) is unused
                  and its weight is not looked at; an expert that a token names twice counts twice
    topk_weights  [num_tokens, top_k] float or bf16 bits
    w13           [num_experts, 2*intermediate, hidden] e4m3; or float or bf16 bits, with scales
                  None; gate rows first, or up rows first with gate_up="up_first", or by turns with
                  gate_up="interleaved"; without a gate [num_experts, intermediate, hidden], and so
                  below: `intermediate` instead of twice it
    w13_scale     [num_experts, ceil(2*intermediate/128), hidden/128] by absolute row: unless
                  intermediate is a multiple of 128, one block holds the end of the first half and
                  the start of the second; of interleaved rows, 64 of each. Or of channels
                  [num_experts, 2*intermediate], experts [num_experts], or gate and up, in the order
                  of rows, [num_experts, 2], each with trailing ones or not
    w2            [num_experts, hidden, intermediate] as w13
    w2_scale      [num_experts, hidden/128, ceil(intermediate/128)], or as w13_scale
                  MXFP4: two codes in an element of w13 and w2, and scales in e8m0 for each 32 of a
                  row (mxfp4.quantize_mxfp4)
    w13_bias      None or [num_experts, 2*intermediate] float or bf16 bits, in the order of rows
    w2_bias       None or [num_experts, hidden]
    format        one of formats.FORMATS; None for FP8 with scales and bf16 without
    returns       float64 [num_tokens, hidden], before the rounding to bf16

    requantize=False is the formula on the dequantised inputs, in float64. requantize=True rounds
    where the kernel does: mid by `quantize_tokens`, or for bf16 weights factor * weight * mid to
    bf16; each slot's weighted row to bf16, and the sum of the rows, in slot order, to float32.
    Raises ValueError for shapes that do not fit each other.
    """
    check_gate_up(gate_up)
    gated = Activation.of(activation).gated
    form = format_of(format or ("bf16" if w13_scale is None else "fp8_block"))
    if form.quantizes and x_scale is None:
        x, x_scale = quantize_tokens(x, xp)
    num_tokens, hidden = x.shape
    packed = 2 if form.is_mx else 1
    num_experts, intermediate = w2.shape[0], packed * w2.shape[2]
    top_k = topk_ids.shape[1]
    rows = intermediate * (2 if gated else 1)
    if w13.shape != (num_experts, rows, hidden // packed) or w2.shape[1] != hidden:
        raise ValueError(f"x {x.shape}, w13 {w13.shape} and w2 {w2.shape} do not fit each other")
    if not topk_ids.shape == topk_weights.shape == (num_tokens, top_k):
        raise ValueError(
            f"topk_ids {topk_ids.shape} and topk_weights {topk_weights.shape} do not fit "
            f"x {x.shape}"
        )

    weights = to_float(topk_weights, xp.float64, xp)
    y = xp.zeros((num_tokens, hidden), xp.float64)
    slot_rows = xp.zeros((num_tokens, top_k if requantize else 0, hidden), xp.float32)
    for expert in range(num_experts):
        tokens, slots = xp.nonzero(topk_ids == first_expert + expert)  # of every pair
        if tokens.size == 0:
            continue
        w13_e = expert_weights(w13, w13_scale, expert, form, xp, gate_up == "interleaved")
        w2_e = expert_weights(w2, w2_scale, expert, form, xp)
        if form.quantizes:
            scales = x_scale if x_scale.size == 1 else x_scale[tokens]
            x_e = dequantize_tokens(x[tokens], scales, xp)
        else:
            x_e = to_float(x[tokens], xp.float64, xp)
        gate_and_up = xp.matmul(x_e, w13_e.T)
        pair_weights = weights[tokens, slots][:, None]
        if apply_router_weight_on_input:
            gate_and_up, pair_weights = pair_weights * gate_and_up, 1.0
        if w13_bias is not None:
            gate_and_up = gate_and_up + to_float(w13_bias[expert], xp.float64, xp)
        halves = split(gate_and_up, gate_up) if gated else (gate_and_up, None)
        mid = activate(*halves, activation, xp)
        factors = bias_factors = routed_scaling_factor * pair_weights
        if requantize and form.quantizes:
            mid = dequantize_tokens(*quantize_tokens(mid, xp), xp)
        elif requantize:
            mid, factors = round_bf16(factors * mid, xp).astype(xp.float64), 1.0
        rows = factors * xp.matmul(mid, w2_e.T)
        if w2_bias is not None:
            rows = rows + bias_factors * to_float(w2_bias[expert], xp.float64, xp)
        if requantize:
            slot_rows[tokens, slots] = round_bf16(rows, xp)
            continue
        for slot in range(top_k):  # a token may name an expert twice
            y[tokens[slots == slot]] += rows[slots == slot]
    if requantize:
        total = xp.zeros((num_tokens, hidden), xp.float32)
        for slot in range(top_k):
            total += slot_rows[:, slot]
        y = total.astype(xp.float64)
    return y


def relative_error(y, ref, xp=np) -> float:
    """||y - ref|| / ||ref|| in float64; inf if anything is not finite, so that no NaN passes.

    `y` and `ref` are floats or bf16 bits of one shape. With ref all zeros: 0 if y is too, else inf.
    """
    y, ref = _comparable(y, ref, xp)
    error, norm = (float(xp.sqrt((a * a).sum())) for a in (y - ref, ref))
    if not np.isfinite(error + norm):
        return float("inf")
    return error / norm if norm else (float("inf") if error else 0.0)


def worst_element(y, ref, xp=np) -> float:
    """The largest |y - ref| / (|ref| + root mean square of ref over its row) of two matrices.

    The row's own scale is the measure, so that one wrong element shows in a token of small values
    beside tokens of large ones, while an element near zero is not judged by its own size. inf if
    anything is not finite or a row of zeros is not met exactly; 0 for empty matrices.
    """
    y, ref = _comparable(y, ref, xp)
    if y.size == 0:
        return 0.0
    error = xp.abs(y - ref)
    allowed = xp.abs(ref) + xp.sqrt((ref * ref).mean(axis=-1, keepdims=True))
    if not bool(xp.isfinite(error).all()) or bool(((allowed == 0) & (error > 0)).any()):
        return float("inf")
    return float((error / xp.where(allowed == 0, 1.0, allowed)).max())


def _comparable(y, ref, xp):
    if y.shape != ref.shape:
        raise ValueError(f"y must have the shape of ref, {ref.shape}, got {y.shape}")
    return to_float(y, xp.float64, xp), to_float(ref, xp.float64, xp)


class Layer(NamedTuple):
    """Weights in the order `mega_moe` takes them: codes uint8 and scales f32 (MXFP4: uint8), or
    bf16 bits uint16 and no scales.
    """

    w13: Any
    w13_scale: Any
    w2: Any
    w2_scale: Any


class Tokens(NamedTuple):
    """x f32 [num_tokens, hidden] of bf16 values; ids i32 and weights f32 [num_tokens, top_k]."""

    x: Any
    topk_ids: Any
    topk_weights: Any


def random_layer(
    num_experts: int,
    hidden: int,
    intermediate: int,
    seed: int,
    xp=np,
    outliers: int = 0,
    format: str = "fp8_block",
    gated: bool = True,
) -> Layer:
    """Weights from N(0, 1) / sqrt(K), made and brought into a format of `plan.formats` one expert
    at a time where `xp` lives; w13 of experts with a gate or without.

    In each matrix, `outliers` input channels are 30 times as large. NumPy and CuPy draw different
    numbers from one seed.
    """
    rng = xp.random.default_rng(seed)
    codes, factors = ([], []), ([], [])  # of w13 and of w2
    for _ in range(num_experts):
        w13_rows = intermediate * (2 if gated else 1)
        for idx, (rows, cols) in enumerate(((w13_rows, hidden), (hidden, intermediate))):
            w = rng.standard_normal((rows, cols), dtype=xp.float32) * xp.float32(cols**-0.5)
            _enlarge_channels(w, outliers, rng, xp)
            expert_codes, expert_factors = quantize.weights(w, format, xp)
            codes[idx].append(expert_codes)
            if expert_factors is not None:
                factors[idx].append(expert_factors)
    stacked = (parts[idx] for idx in (0, 1) for parts in (codes, factors))
    return Layer(*(xp.stack(part) if part else None for part in stacked))


def random_tokens(
    num_tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    seed: int,
    routing: str = "uniform",
    xp=np,
    outliers: int = 0,
    zipf_exponent: float = 1.0,
) -> Tokens:
    """x from N(0, 1), `outliers` channels of it 30 times as large, and a routing with its weights.

    routing  uniform     top k of N(0, 1) scores, weighted by the softmax of their scores
             zipf        distinct experts drawn with probability proportional to
                         (1 + expert) ** -zipf_exponent
             hot_expert  uniform, but the middle expert is among every token's
             one_expert  the middle expert in slot 0 of every token, the other slots unused
             unused      uniform, then a sixth of the slots is -1, a sixth past the last expert
             duplicates  every slot drawn by itself, so that a token may name an expert twice

    Raises ValueError for another routing, or if top_k distinct experts do not exist.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    if routing != "duplicates" and top_k > num_experts:
        raise ValueError(
            f"routing {routing} needs top_k up to num_experts={num_experts}, got {top_k}; "
            "take duplicates"
        )
    rng = xp.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, hidden), dtype=xp.float32)
    _enlarge_channels(x, outliers, rng, xp)

    scores = rng.standard_normal((num_tokens, num_experts), dtype=xp.float32)
    if routing == "zipf":  # the largest of log(p) + Gumbel noise are a draw without replacement
        noise = -xp.log(rng.standard_exponential((num_tokens, num_experts)))
        log_ranks = xp.log(xp.arange(1, num_experts + 1))
        scores = (noise - zipf_exponent * log_ranks).astype(xp.float32)
    order = -scores
    if routing in ("hot_expert", "one_expert"):
        order[:, num_experts // 2] = -xp.inf
    ids = xp.argsort(order, axis=1)[:, :top_k]
    if routing == "duplicates":
        ids = rng.integers(0, num_experts, (num_tokens, top_k))
    weights = xp.exp(xp.take_along_axis(scores, ids, axis=1))  # such scores are far from overflow
    weights /= weights.sum(axis=1, keepdims=True)
    if routing == "one_expert":
        ids[:, 1:] = -1
    if routing == "unused":
        lot = rng.random((num_tokens, top_k))
        ids = xp.where(lot < 1 / 6, -1, xp.where(lot < 1 / 3, num_experts + 5, ids))
    return Tokens(round_bf16(x, xp), ids.astype(xp.int32), weights)


def _enlarge_channels(matrix, num_channels, rng, xp):
    if num_channels:
        picked = xp.argsort(rng.random(matrix.shape[1]))[:num_channels]  # CuPy has no `choice`
        matrix[:, picked] *= OUTLIER_FACTOR
