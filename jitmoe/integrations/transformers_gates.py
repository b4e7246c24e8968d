"""What the gate of an experts module computes, found by trying its `_apply_gate` on numbers."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

import torch
from transformers.activations import ACT2FN

from jitmoe import Activation
from jitmoe.integrations.transformers_refusals import refuse

# Forms of a gate, by the numbers that are set, and what they compute.
FORMS = {
    "plain": "act(gate) * up",
    "limit": "act(gate) * up, cut off at the limit",
    "alpha": "gate * sigmoid(alpha * gate) * (up + 1), cut off at the limit",
}
# Attributes of those numbers, of which FP8Experts has two for the limit.
_ALPHAS, _LIMITS = ("swiglu_alpha", "alpha"), ("swiglu_limit", "limit")
SOFTCAPS = ("gate_softcap", "up_softcap")  # no kernel computes those

_ALLOWED = "activation silu, gelu or relu2"
_silu, _gelu = torch.nn.functional.silu, torch.nn.functional.gelu
_FUNCTIONS = {
    "swiglu": _silu,
    "geglu_erf": _gelu,
    "geglu_tanh": lambda x: _gelu(x, approximate="tanh"),
    "reglu2": lambda x: torch.relu(x) ** 2,
}
_NO_GATE = {  # the kinds of the same functions where experts have no gate
    "swiglu": "silu_no_gate",
    "geglu_erf": "gelu_erf_no_gate",
    "geglu_tanh": "gelu_tanh_no_gate",
    "reglu2": "relu2_no_gate",
}
_VALUES = torch.tensor([-1e3, -20.0, -3.0, -0.5, 0.0, 0.5, 3.0, 20.0, 1e3], device="cpu")
_ALPHA, _LIMIT = 1.5, 2.0  # that _VALUES lie on both sides of


def has_gate(module) -> bool:
    return getattr(module, "has_gate", True)


def activation_of(module) -> Activation | str:
    """What the kernel is to compute for `module`. Raises NotImplementedError, one sentence, for a
    gate that there is no kernel for.
    """
    act_fn = getattr(module, "act_fn", None)
    kind = None if act_fn is None else _KINDS.get(type(act_fn)) or _KINDS.get(act_fn, "")
    if not has_gate(module):  # calls act_fn, whatever numbers there are
        if not kind:
            refuse(module, _ALLOWED, type(act_fn).__name__, 'choose "grouped_mm"')
        return _NO_GATE[kind]
    alpha, limit = _number(module, _ALPHAS), _number(module, _LIMITS)
    if alpha is not None and limit is None:
        refuse(module, "a swiglu_limit beside swiglu_alpha", limit, 'choose "grouped_mm"')
    form = "plain" if limit is None else "limit" if alpha is None else "alpha"
    if kind == "" or (kind not in (None, "swiglu") and form != "plain"):
        allowed = "activation silu" if form != "plain" else _ALLOWED
        refuse(module, allowed, type(act_fn).__name__, 'choose "grouped_mm"')
    gate = module.__dict__.get("_apply_gate", type(module)._apply_gate)
    if not _is_constant(gate, form, kind, not module.is_concatenated):
        got = getattr(gate, "__qualname__", gate)
        refuse(module, f"_apply_gate {FORMS[form]}", got, 'choose "grouped_mm"')
    if form == "plain":
        return kind or "swiglu"
    if form == "limit":
        return Activation("swiglu_clamped", 1.0, limit, 0.0)
    return Activation("swiglu_oai", alpha, limit, 1.0)


def _number(module, names: tuple[str, str]):
    """The number under any of `names`, None if there is none."""
    found = [getattr(module, name) for name in names if hasattr(module, name)]
    if found[1:] and found[0] != found[1]:
        refuse(module, f"{names[1]} {found[0]} as {names[0]}", found[1], 'choose "grouped_mm"')
    return found[0] if found else None


@torch.compiler.assume_constant_result
def _is_constant(gate, form: str, kind: str | None, interleaved: bool) -> bool:
    """`computes`, as torch.compile takes it: asked while it traces."""
    return computes(gate, form, kind, interleaved)


@lru_cache
def computes(gate, form: str, kind: str | None = "swiglu", interleaved: bool = False) -> bool:
    """Whether an `_apply_gate` computes what FORMS says with the function `kind` as act, where gate
    and up lie one after the other or interleaved. No if it reads another attribute, which a later
    transformers may have added, or `act_fn` where `kind` is None.
    """
    act = _FUNCTIONS[kind or "swiglu"]
    gates, ups = _VALUES.repeat_interleave(len(_VALUES)), _VALUES.repeat(len(_VALUES))
    low, clipped = gates.clamp(max=_LIMIT), ups.clamp(-_LIMIT, _LIMIT)
    alpha, limit, wanted = {
        "plain": (None, None, act(gates) * ups),
        "limit": (None, _LIMIT, act(low) * clipped),
        "alpha": (_ALPHA, _LIMIT, low * torch.sigmoid(_ALPHA * low) * (clipped + 1)),
    }[form]
    fields = dict.fromkeys(SOFTCAPS) | dict.fromkeys(_ALPHAS, alpha) | dict.fromkeys(_LIMITS, limit)
    if kind is not None:
        fields["act_fn"] = act
    gate_up = torch.stack([gates, ups], -1).flatten() if interleaved else torch.cat([gates, ups])
    try:
        return torch.allclose(gate(SimpleNamespace(**fields), gate_up[None])[0], wanted)
    except Exception:  # whatever a function of another kind says to these arguments
        return False


def _kinds() -> dict:
    """Classes of activations, and functions, that compute what a kernel of that kind does."""
    kinds = {torch.nn.SiLU: "swiglu", _silu: "swiglu", _gelu: "geglu_erf"}
    for name, kind in (
        ("silu", "swiglu"),
        ("gelu", "geglu_erf"),
        ("gelu_new", "geglu_tanh"),
        ("gelu_pytorch_tanh", "geglu_tanh"),
        ("relu2", "reglu2"),
    ):
        if name in ACT2FN and torch.allclose(
            ACT2FN[name](_VALUES), _FUNCTIONS[kind](_VALUES), atol=1e-6
        ):
            kinds[type(ACT2FN[name])] = kind
    return kinds


_KINDS = _kinds()
