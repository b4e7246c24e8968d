"""mega_moe() behind the door for backend="emulated": NumPy arrays, the kernel on this CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.emulate.session import TIMEOUT_S
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.variant import Variant
from jitmoe.reference import Layer
from jitmoe.reference_biases import Biases
from jitmoe.weights import ExpertWeights

NUM_BLOCKS = 4  # enough for blocks to wait for each other; more are slower


def run(
    plan: MegaMoePlan | None,
    x: np.ndarray,
    x_scale: np.ndarray | None,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    weights: ExpertWeights,
    out: np.ndarray | None,
    variant: Variant,
    expert_counts: np.ndarray | None,
) -> np.ndarray:
    """One launch of arguments that were found right; returns `out`, by default a new array of
    uint16 where x is unsigned, else of bfloat16. No tokens need no plan.

    Raises ValueError if an array to be written is read-only, NoHostCompiler, HostCompileError,
    EmulationError.
    """
    num_tokens = len(x)
    if out is None:
        dtype = np.uint16 if x.dtype.kind == "u" else ml_dtypes.bfloat16
        out = np.empty((num_tokens, weights.hidden), dtype)
    for name, array in (("out", out), ("expert_counts", expert_counts)):
        if array is not None and not array.flags.writeable:
            raise ValueError(f"{name} must be writable, got a read-only array; copy it")
    if num_tokens > 0:
        given = x, x_scale, topk_ids, topk_weights, weights, out, variant
        launch(plan, *given, expert_counts)
    return out


def launch(
    plan: MegaMoePlan,
    x: np.ndarray,
    x_scale: np.ndarray | None,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    weights: ExpertWeights,
    out: np.ndarray,
    variant: Variant,
    expert_counts: np.ndarray | None = None,
) -> EmulatedLayer:
    """One launch into `out`; returns what it ran on, which keeps the stamps of a traced plan."""
    w13, w2, w13_scale, w2_scale = weights.tensors
    layer = Layer(_unsigned(w13), w13_scale, _unsigned(w2), w2_scale)
    biases = Biases(*map(_float_bits, weights.bias_tensors)) if weights.has_bias else None
    emulated = EmulatedLayer(
        plan, layer, len(x), NUM_BLOCKS, biases=biases, expert_counts=expert_counts
    )
    rows = _unsigned(x)
    if x_scale is not None:
        # The emulator's memory begins where an array does.
        rows = rows, x_scale if min(x_scale.strides, default=0) >= 0 else x_scale.copy()
    y = emulated(rows, topk_ids, _float_bits(topk_weights), variant, timeout_s=TIMEOUT_S)
    _unsigned(out)[...] = y
    return emulated


def _float_bits(array: np.ndarray) -> np.ndarray:
    """f32 as it is, bf16 as bits."""
    return array if array.dtype == np.float32 else _unsigned(array)


def _unsigned(array: np.ndarray) -> np.ndarray:
    """Codes or bits, as the emulator and the oracle know formats."""
    return array.view(np.dtype(f"u{array.itemsize}"))
