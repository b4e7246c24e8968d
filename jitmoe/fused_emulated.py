"""mega_moe() behind the door for backend="emulated": NumPy arrays, the kernel on this CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jitmoe.emulate.mega_moe import EmulatedLayer
from jitmoe.emulate.session import TIMEOUT_S
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.variant import Variant
from jitmoe.reference import Layer
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
) -> np.ndarray:
    """One launch of arguments that were found right; returns `out`, by default a new array of
    uint16 where x is unsigned, else of bfloat16. No tokens need no plan.

    Raises ValueError if `out` is read-only, NoHostCompiler, HostCompileError, EmulationError.
    """
    num_tokens = len(x)
    if out is None:
        dtype = np.uint16 if x.dtype.kind == "u" else ml_dtypes.bfloat16
        out = np.empty((num_tokens, weights.hidden), dtype)
    if not out.flags.writeable:
        raise ValueError("out must be writable, got a read-only array; copy it")
    if num_tokens > 0:
        launch(plan, x, x_scale, topk_ids, topk_weights, weights, out, variant)
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
) -> EmulatedLayer:
    """One launch into `out`; returns what it ran on, which keeps the stamps of a traced plan."""
    w13, w2, w13_scale, w2_scale = weights.tensors
    layer = Layer(w13, w13_scale, w2, w2_scale)
    emulated = EmulatedLayer(plan, layer, max_tokens=len(x), num_blocks=NUM_BLOCKS)
    rows = _unsigned(x)
    if x_scale is not None:
        # The emulator's memory begins where an array does.
        rows = rows, x_scale if min(x_scale.strides, default=0) >= 0 else x_scale.copy()
    if topk_weights.dtype != np.float32:
        topk_weights = _unsigned(topk_weights)
    y = emulated(rows, topk_ids, topk_weights, variant, timeout_s=TIMEOUT_S)
    _unsigned(out)[...] = y
    return emulated


def _unsigned(array: np.ndarray) -> np.ndarray:
    """Codes or bits, as the emulator and the oracle know formats."""
    return array.view(np.dtype(f"u{array.itemsize}"))
