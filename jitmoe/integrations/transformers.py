"""The layer as an experts implementation of transformers: `register()`, then
`experts_implementation="jitmoe"`.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from transformers.activations import ACT2FN
from transformers.integrations import finegrained_fp8, moe

from jitmoe.integrations.torch import mega_moe

NAME = "jitmoe"

# What, if set, makes the gate of FP8Experts another than silu(gate) * up.
_GATE_FIELDS = ("gate_softcap", "up_softcap", "swiglu_alpha", "swiglu_limit", "limit")
# Attributes of a module, the only value allowed (as good as none), and an implementation of
# transformers that takes others.
_NEEDS = (
    ("has_gate", True, "grouped_mm"),
    ("is_concatenated", True, "grouped_mm"),
    ("is_transposed", False, "grouped_mm"),
    ("has_bias", False, "grouped_mm"),
    ("has_post_expert_norm", False, "grouped_mm"),
    ("activation_scheme", "dynamic", "eager"),
    *((field, None, "grouped_mm") for field in _GATE_FIELDS),
)


def register(backend: str = "cuda") -> None:
    """Put "jitmoe" into both registries of transformers: that of FP8 experts, which it runs, and
    that of the others, which it refuses.

    backend  as in `jitmoe.integrations.torch.mega_moe`

    Afterwards `from_pretrained(..., experts_implementation="jitmoe")` and
    `model.set_experts_implementation("jitmoe")` choose it. Weights are used in place, so a model
    may be set to another implementation and back at any time. Registering again replaces.
    """
    if backend not in ("cuda", "emulated"):
        raise ValueError(f'backend must be "cuda" or "emulated", got {backend!r}')
    finegrained_fp8.FP8ExpertsInterface.register(NAME, partial(fp8_experts, backend=backend))
    moe.ExpertsInterface.register(NAME, refuse_experts)


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
    _check(module, hidden_states)
    scales = module.gate_up_proj_scale_inv, module.down_proj_scale_inv
    if module.block_size is None:  # of experts, and halves of w13: [num_experts, 1 or 2, 1]
        scales = [scale.flatten(1) for scale in scales]
    return mega_moe(
        hidden_states.contiguous(),
        top_k_index.contiguous(),
        top_k_weights.contiguous(),
        module.gate_up_proj,
        module.down_proj,
        *scales,
        backend=backend,
    )


def refuse_experts(module, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
    """The forward of experts that are not FP8. Raises NotImplementedError."""
    raise NotImplementedError(
        f'{_named(module)}: experts_implementation="{NAME}" needs FP8 weights, got '
        f'{_dtype(next(module.parameters()))}; load an FP8 checkpoint, or choose "grouped_mm"'
    )


def _check(module, hidden_states) -> None:
    """Raise NotImplementedError unless the kernel computes what `module` does."""
    for name, allowed, instead in _NEEDS:
        got = getattr(module, name, allowed)
        if got != allowed:
            _refuse(module, f"{name} {allowed}", got, f'choose "{instead}"')
    if tuple(module.block_size or (128, 128)) != (128, 128):
        _refuse(module, "block_size (128, 128) or None", module.block_size, 'choose "grouped_mm"')
    if not isinstance(module.act_fn, _SILU):
        _refuse(module, "activation silu", type(module.act_fn).__name__, 'choose "grouped_mm"')
    gate = module.__dict__.get("_apply_gate", type(module)._apply_gate)
    if not any(gate is plain for plain in _PLAIN_GATES):
        got = getattr(gate, "__qualname__", gate)
        _refuse(module, "_apply_gate silu(gate) * up", got, 'choose "grouped_mm"')
    if module.gate_up_proj.dtype != torch.float8_e4m3fn:
        got = _dtype(module.gate_up_proj)
        _refuse(module, "weights in float8_e4m3fn", got, 'choose "deepgemm" for FP4, else "eager"')
    if hidden_states.dtype != torch.bfloat16:
        got = _dtype(hidden_states)
        _refuse(module, "activations in bfloat16", got, "load the model with dtype=torch.bfloat16")


def _refuse(module, allowed: str, got, remedy: str) -> None:
    raise NotImplementedError(
        f'{_named(module)}: experts_implementation="{NAME}" needs {allowed}, got {got}; {remedy}'
    )


def _named(module) -> str:
    model = getattr(getattr(module, "config", None), "model_type", "")
    return type(module).__name__ + (f" of {model}" if model else "")


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))


def _is_plain(gate) -> bool:
    """Whether an `_apply_gate` is silu(gate) * up where none of _GATE_FIELDS is set; no if it reads
    another attribute, which a later transformers may have added.
    """
    values = torch.tensor([-1e3, -20.0, -3.0, -0.5, 0.0, 0.5, 3.0, 20.0, 1e3], device="cpu")
    gates, ups = values.repeat_interleave(len(values)), values.repeat(len(values))
    module = SimpleNamespace(act_fn=torch.nn.functional.silu, **dict.fromkeys(_GATE_FIELDS))
    try:
        mid = gate(module, torch.cat([gates, ups])[None])
    except AttributeError:
        return False
    return torch.allclose(mid, torch.nn.functional.silu(gates) * ups)


_GATES = (getattr(finegrained_fp8.FP8Experts, "_apply_gate", None), moe._default_apply_gate)
_PLAIN_GATES = [gate for gate in _GATES if gate is not None and _is_plain(gate)]
