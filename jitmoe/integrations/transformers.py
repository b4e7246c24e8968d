"""The layer as an experts implementation of transformers: `register()`, then
`experts_implementation="jitmoe"`.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from transformers.activations import ACT2FN
from transformers.integrations import finegrained_fp8, moe

from jitmoe import Activation
from jitmoe.integrations.torch import mega_moe

NAME = "jitmoe"

# Numbers of the gate of FP8Experts, which has the limit twice.
_NUMBERS = ("swiglu_alpha", "swiglu_limit", "limit")
# What, if set, makes the gate one that there is no kernel for.
_SOFTCAPS = ("gate_softcap", "up_softcap")
# Attributes of a module, the only value allowed (as good as none), and an implementation of
# transformers that takes others.
_NEEDS = (
    ("is_concatenated", True, "grouped_mm"),
    ("is_transposed", False, "grouped_mm"),
    ("has_bias", False, "grouped_mm"),
    ("has_post_expert_norm", False, "grouped_mm"),
    ("activation_scheme", "dynamic", "eager"),
    *((field, None, "grouped_mm") for field in _SOFTCAPS),
)


def register(backend: str = "cuda") -> None:
    """Put "jitmoe" into both registries of transformers: that of FP8 experts, and that of the
    others, of which it runs those in bf16.

    backend  as in `jitmoe.integrations.torch.mega_moe`

    Afterwards `from_pretrained(..., experts_implementation="jitmoe")` and
    `model.set_experts_implementation("jitmoe")` choose it. Weights are used in place, so a model
    may be set to another implementation and back at any time. Registering again replaces.
    """
    if backend not in ("cuda", "emulated"):
        raise ValueError(f'backend must be "cuda" or "emulated", got {backend!r}')
    finegrained_fp8.FP8ExpertsInterface.register(NAME, partial(fp8_experts, backend=backend))
    moe.ExpertsInterface.register(NAME, partial(bf16_experts, backend=backend))


def fp8_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    backend: str = "cuda",
) -> torch.Tensor:
    """The forward of an FP8Experts module, in one launch.

    hidden_states  [num_tokens, hidden] bf16
    top_k_index    [num_tokens, top_k] int32 or int64; what is no expert's number, as the ids of
                   other ranks' experts, is an unused slot
    top_k_weights  [num_tokens, top_k] f32 or bf16
    returns        [num_tokens, hidden] bf16

    Raises NotImplementedError, one sentence, for a module or a dtype that the kernel has no form
    for, and what `jitmoe.integrations.torch.mega_moe` raises.
    """
    activation = _check(module, hidden_states)
    if tuple(module.block_size or (128, 128)) != (128, 128):
        _refuse(module, "block_size (128, 128) or None", module.block_size, 'choose "grouped_mm"')
    if _w13(module).dtype != torch.float8_e4m3fn:
        got = _dtype(_w13(module))
        _refuse(module, "weights in float8_e4m3fn", got, 'choose "deepgemm" for FP4, else "eager"')
    scales = _w13(module, "_scale_inv"), module.down_proj_scale_inv
    if module.block_size is None:  # of experts, and halves of w13: [num_experts, 1 or 2, 1]
        scales = [scale.flatten(1) for scale in scales]
    given = hidden_states, top_k_index, top_k_weights
    return _run(module, given, scales, activation, backend)


def bf16_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    backend: str = "cuda",
) -> torch.Tensor:
    """The forward of an experts module whose weights are bf16, as `fp8_experts`."""
    activation = _check(module, hidden_states)
    if _w13(module).dtype != torch.bfloat16:
        got = _dtype(_w13(module))
        remedy = "load the model with dtype=torch.bfloat16, or an FP8 checkpoint"
        _refuse(module, "weights in bfloat16 or FP8", got, remedy)
    given = hidden_states, top_k_index, top_k_weights
    return _run(module, given, (), activation, backend)


def _run(module, given, scales, activation, backend) -> torch.Tensor:
    return mega_moe(
        *(tensor.contiguous() for tensor in given),
        _w13(module),
        module.down_proj,
        *scales,
        activation=activation,
        backend=backend,
    )


def _has_gate(module) -> bool:
    return getattr(module, "has_gate", True)


def _w13(module, suffix: str = "") -> torch.Tensor:
    """Gate and up, or the one projection of experts without a gate; or what belongs to it."""
    return getattr(module, ("gate_up_proj" if _has_gate(module) else "up_proj") + suffix)


def _check(module, hidden_states) -> Activation | str:
    """The activation of `module`. Raises NotImplementedError unless the kernel computes what it
    does, whatever the format of its weights.
    """
    for name, allowed, instead in _NEEDS:
        got = getattr(module, name, allowed)
        if got != allowed:
            _refuse(module, f"{name} {allowed}", got, f'choose "{instead}"')
    if hidden_states.dtype != torch.bfloat16:
        got = _dtype(hidden_states)
        _refuse(module, "activations in bfloat16", got, "load the model with dtype=torch.bfloat16")
    return _activation(module)


def _activation(module) -> Activation | str:
    """What `module` computes between its projections."""
    if not _has_gate(module):  # calls act_fn, whatever numbers there are
        kind = _KINDS.get(type(module.act_fn))
        if kind is None:
            got = type(module.act_fn).__name__
            _refuse(module, "activation silu, gelu or relu2", got, 'choose "grouped_mm"')
        return _NO_GATE[kind]
    alpha, limit, also_limit = (getattr(module, name, None) for name in _NUMBERS)
    if getattr(module, "limit", limit) != limit:
        _refuse(module, f"limit {limit} as swiglu_limit", also_limit, 'choose "grouped_mm"')
    if alpha is not None and limit is None:
        _refuse(module, "a swiglu_limit beside swiglu_alpha", limit, 'choose "grouped_mm"')
    form = "plain" if limit is None else "limit" if alpha is None else "alpha"
    kind = _KINDS.get(type(module.act_fn))
    if kind is None or (kind != "swiglu" and form != "plain"):
        allowed = "silu" if form != "plain" else "silu, gelu or relu2"
        got = type(module.act_fn).__name__
        _refuse(module, f"activation {allowed}", got, 'choose "grouped_mm"')
    gate = module.__dict__.get("_apply_gate", type(module)._apply_gate)
    if not any(gate is known and form in forms for known, forms in _GATES):
        got = getattr(gate, "__qualname__", gate)
        _refuse(module, f"_apply_gate {_WORDS[form]}", got, 'choose "grouped_mm"')
    if form == "plain":
        return kind
    if form == "limit":
        return Activation("swiglu_clamped", 1.0, limit, 0.0)
    return Activation("swiglu_oai", alpha, limit, 1.0)


def _refuse(module, allowed: str, got, remedy: str) -> None:
    raise NotImplementedError(
        f'{_named(module)}: experts_implementation="{NAME}" needs {allowed}, got {got}; {remedy}'
    )


def _named(module) -> str:
    model = getattr(getattr(module, "config", None), "model_type", "")
    return type(module).__name__ + (f" of {model}" if model else "")


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Forms of a gate, by the numbers that are set, and what they compute.
_WORDS = {
    "plain": "act(gate) * up",
    "limit": "act(gate) * up, cut off at the limit",
    "alpha": "gate * sigmoid(alpha * gate) * (up + 1), cut off at the limit",
}
_VALUES = torch.tensor([-1e3, -20.0, -3.0, -0.5, 0.0, 0.5, 3.0, 20.0, 1e3], device="cpu")
_ALPHA, _LIMIT = 1.5, 2.0  # that _VALUES lie on both sides of


def _forms(gate) -> set[str]:
    """The forms in which an `_apply_gate` computes what _WORDS say. None if it reads another
    attribute, which a later transformers may have added.
    """
    gates, ups = _VALUES.repeat_interleave(len(_VALUES)), _VALUES.repeat(len(_VALUES))
    low, clipped = gates.clamp(max=_LIMIT), ups.clamp(-_LIMIT, _LIMIT)
    act, forms = torch.tanh, set()  # any but those that a gate might name itself
    for form, numbers, wanted in (
        ("plain", (None, None, None), act(gates) * ups),
        ("limit", (None, _LIMIT, _LIMIT), act(low) * clipped),
        ("alpha", (_ALPHA, _LIMIT, _LIMIT), low * torch.sigmoid(_ALPHA * low) * (clipped + 1)),
    ):
        fields = dict.fromkeys(_SOFTCAPS) | dict(zip(_NUMBERS, numbers, strict=True))
        try:
            mid = gate(SimpleNamespace(act_fn=act, **fields), torch.cat([gates, ups])[None])
        except AttributeError:
            return set()
        if torch.allclose(mid, wanted):
            forms.add(form)
    return forms


def _kinds() -> dict[type, str]:
    """Classes of activations that compute what a kernel of that kind does."""
    gelu = torch.nn.functional.gelu
    kinds = {torch.nn.SiLU: "swiglu"}
    for name, kind, wanted in (
        ("silu", "swiglu", torch.nn.functional.silu(_VALUES)),
        ("gelu", "geglu_erf", gelu(_VALUES)),
        ("gelu_new", "geglu_tanh", gelu(_VALUES, approximate="tanh")),
        ("gelu_pytorch_tanh", "geglu_tanh", gelu(_VALUES, approximate="tanh")),
        ("relu2", "reglu2", torch.relu(_VALUES) ** 2),
    ):
        if name in ACT2FN and torch.allclose(ACT2FN[name](_VALUES), wanted, atol=1e-6):
            kinds[type(ACT2FN[name])] = kind
    return kinds


_KINDS = _kinds()
_NO_GATE = {  # the kinds of the same functions where experts have no gate
    "swiglu": "silu_no_gate",
    "geglu_erf": "gelu_erf_no_gate",
    "geglu_tanh": "gelu_tanh_no_gate",
    "reglu2": "relu2_no_gate",
}
_GATES = [
    (gate, _forms(gate))
    for gate in (getattr(finegrained_fp8.FP8Experts, "_apply_gate", None), moe._default_apply_gate)
    if gate is not None
]
