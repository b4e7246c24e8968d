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
    reglu2       Shazeer's ReGLU with the square of relu, by D. So et al., Primer (2021)
    ..._no_gate  the function of `gate` alone, which is all that w13 gives there; `up` is None.
                 relu2_no_gate: Nemotron-H, modeling_nemotron_h.py of transformers, NemotronHExperts
    """
    activation = Activation.of(activation)
    kind, limit = activation.kind, activation.limit
    if not activation.gated:
        return _without_gate(gate, kind, xp)
    if kind == "swiglu":
        return silu(gate, xp) * up
    if kind in ("swiglu_clamped", "swiglu_oai"):
        gate, up = xp.minimum(gate, limit), xp.clip(up, -limit, limit)
        return gate * sigmoid(activation.alpha * gate, xp) * (up + activation.up_offset)
    if kind == "reglu2":
        return relu2(gate, xp) * up
    return (gelu_tanh if kind == "geglu_tanh" else gelu_erf)(gate, xp) * up


def _without_gate(x, kind: str, xp):
    functions = {"relu2": relu2, "silu": silu, "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf}
    return functions[kind.removesuffix("_no_gate")](x, xp)


def relu2(x, xp=np):
    """max(x, 0)^2"""
    return xp.maximum(x, 0) ** 2


def gelu_tanh(x, xp=np):
    """gelu by its approximation."""
    return 0.5 * x * (1 + xp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def gelu_erf(x, xp=np):
    """x times the standard normal distribution function of x."""
    return 0.5 * x * (1 + _erf(x / 2**0.5, xp))


def split(gate_and_up, gate_up: str):
    """Gate and up, whose columns are in an order of `plan.variant.GATE_UP`."""
    if gate_up == "interleaved":
        return gate_and_up[:, ::2], gate_and_up[:, 1::2]
    half = gate_and_up.shape[1] // 2
    first, second = gate_and_up[:, :half], gate_and_up[:, half:]
    return (second, first) if gate_up == "up_first" else (first, second)


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
