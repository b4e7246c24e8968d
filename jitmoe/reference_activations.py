"""The oracle's activations, in float64."""

from __future__ import annotations

import math

import numpy as np

from jitmoe.plan.variant import Activation


def activate(gate, up, activation: Activation | str = "swiglu", xp=np):
    """What an expert does between its GEMMs, by the formulas of the models' own code.

    swiglu       N. Shazeer, GLU Variants Improve Transformer (2020)
    swiglu_clamped
                 DeepSeek-V4, inference/model.py, Expert.forward: gate is clamped above, up on both
                 sides, before silu(gate) * up
    swiglu_oai   gpt-oss, gpt_oss/torch/model.py, swiglu: the same clamps, then
                 gate * sigmoid(alpha * gate) * (up + 1)
    geglu_tanh, geglu_erf
                 Shazeer too; gelu by D. Hendrycks and K. Gimpel, Gaussian Error Linear Units (2016)
    """
    activation = Activation.of(activation)
    kind, limit = activation.kind, activation.limit
    if kind == "swiglu":
        return silu(gate, xp) * up
    if kind in ("swiglu_clamped", "swiglu_oai"):
        gate, up = xp.minimum(gate, limit), xp.clip(up, -limit, limit)
        return gate * sigmoid(activation.alpha * gate, xp) * (up + activation.up_offset)
    if kind == "geglu_tanh":
        inner = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + xp.tanh(inner)) * up
    return 0.5 * gate * (1 + _erf(gate / 2**0.5, xp)) * up


def sigmoid(x, xp=np):
    """1 / (1 + exp(-x)), without overflow and accurate for large negative x too."""
    return xp.exp(-xp.logaddexp(xp.zeros_like(x), -x))


def _erf(x, xp):
    """The error function in float64; NumPy has none."""
    if xp is np:
        return np.vectorize(math.erf, otypes=[np.float64])(x)
    return xp.ElementwiseKernel("float64 x", "float64 y", "y = erf(x)", "jitmoe_erf")(x)


def silu(x, xp=np):
    """x * sigmoid(x), without overflow and accurate for large negative x too."""
    return x * sigmoid(x, xp)
