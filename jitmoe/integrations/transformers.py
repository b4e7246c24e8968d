"""The layer as an experts implementation of transformers: `register()`, then
`experts_implementation="jitmoe"`.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers.integrations import finegrained_fp8, moe

from jitmoe import Activation
from jitmoe.integrations.static_scales import check_static
from jitmoe.integrations.torch import mega_moe
from jitmoe.integrations.transformers_gates import SOFTCAPS, activation_of, has_gate
from jitmoe.integrations.transformers_refusals import NAME, dtype_of, refuse
from jitmoe.integrations.transformers_weights import rows_of, w13_of

# Attributes of a module, the only value allowed (as good as none), and an implementation of
# transformers that takes others.
_NEEDS = (
    ("has_post_expert_norm", False, "grouped_mm"),
    *((field, None, "grouped_mm") for field in SOFTCAPS),
)
# Of FP8Experts in FP4, as DeepSeek-V4's: two e2m1 codes an element, a scale for 32 of a row.
_FP4 = (torch.int8, getattr(torch, "float4_e2m1fn_x2", None))
_E8M0 = (torch.uint8, getattr(torch, "float8_e8m0fnu", None))
_FP8_NEEDS = (
    ("is_concatenated", True, "grouped_mm"),
    ("is_transposed", False, "grouped_mm"),
    ("has_bias", False, "grouped_mm"),
)


def register(backend: str = "cuda") -> None:
    """Put "jitmoe" into both registries of transformers: that of FP8 experts, and that of the
    others, of which it runs those in bf16.

    backend  as in `jitmoe.integrations.torch.mega_moe`

    Afterwards `from_pretrained(..., experts_implementation="jitmoe")` and
    `model.set_experts_implementation("jitmoe")` choose it. Weights are used in place, and no second
    copy is kept, so a model may be set to another implementation and back at any time. Those of
    transposed modules (gpt-oss) are laid out anew in memory at the first call, which needs room for
    one more parameter of one layer while it lasts; shapes and values stay. Such a model must be
    called once before torch.compile(fullgraph=True) or the capture of a CUDA graph, and graphs
    captured with another implementation before that must be captured again. Registering again
    replaces.
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
    """The forward of an FP8Experts module, in one launch; in FP8 or, as DeepSeek-V4's, in FP4.

    hidden_states  [num_tokens, hidden] bf16
    top_k_index    [num_tokens, top_k] int32 or int64; what is no expert's number, as the ids of
                   other ranks' experts, is an unused slot
    top_k_weights  [num_tokens, top_k] f32 or bf16
    returns        [num_tokens, hidden] bf16

    Raises NotImplementedError, one sentence, for a module or a dtype that the kernel has no form
    for, and what `jitmoe.integrations.torch.mega_moe` raises. Static scales of activations are
    checked and not applied, for the kernel quantises finer: ValueError unless they are positive and
    finite, and one number or one for each expert.
    """
    activation = _check(module, hidden_states, _NEEDS + _FP8_NEEDS)
    _check_scheme(module)
    given = hidden_states, top_k_index, top_k_weights
    w13 = getattr(module, w13_of(module))
    scales = getattr(module, f"{w13_of(module)}_scale_inv"), module.down_proj_scale_inv
    if w13.dtype in _FP4:
        if scales[0].dtype not in _E8M0:
            got = dtype_of(scales[0])
            refuse(module, "scales of FP4 in float8_e8m0fnu", got, 'choose "eager"')
        return _run(module, given, scales, activation, backend, "mxfp4_fp8")
    if tuple(module.block_size or (128, 128)) != (128, 128):
        refuse(module, "block_size (128, 128) or None", module.block_size, 'choose "grouped_mm"')
    if w13.dtype != torch.float8_e4m3fn:
        refuse(module, "weights in float8_e4m3fn or FP4", dtype_of(w13), 'choose "eager"')
    if module.block_size is None:  # of experts, and halves of w13: [num_experts, 1 or 2, 1]
        scales = [scale.flatten(1) for scale in scales]
    return _run(module, given, scales, activation, backend)


def bf16_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    backend: str = "cuda",
) -> torch.Tensor:
    """The forward of an experts module whose weights are bf16, as `fp8_experts`; with or without
    biases, gate and up one after the other or interleaved, transposed or not.

    Raises RuntimeError too, for a transposed module, as `transformers_weights.rows_of` says.
    """
    activation = _check(module, hidden_states)
    w13 = getattr(module, w13_of(module))
    if w13.dtype != torch.bfloat16:
        got = dtype_of(w13)
        remedy = "load the model with dtype=torch.bfloat16, or an FP8 checkpoint"
        refuse(module, "weights in bfloat16 or FP8", got, remedy)
    given = hidden_states, top_k_index, top_k_weights
    return _run(module, given, (), activation, backend)


def _run(module, given, scales, activation, backend, format=None) -> torch.Tensor:
    name, biases = w13_of(module), {}
    if module.has_bias:
        biases = {"w13_bias": getattr(module, f"{name}_bias"), "w2_bias": module.down_proj_bias}
    return mega_moe(
        *(tensor.contiguous() for tensor in given),
        rows_of(module, name),
        rows_of(module, "down_proj"),
        *scales,
        **biases,
        activation=activation,
        gate_up="interleaved" if has_gate(module) and not module.is_concatenated else "gate_first",
        format=format,
        backend=backend,
    )


def _check_scheme(module) -> None:
    scheme = getattr(module, "activation_scheme", "dynamic")
    if scheme == "static":
        # Of experts without a gate, the first is named as that of the others in 5.24.
        names = [f"{part}_activation_scale" for part in ("gate_up_proj", "up_proj", "down_proj")]
        scales = {name: getattr(module, name, None) for name in names}
        check_static(scales, module.down_proj.shape[0])
    elif scheme != "dynamic":
        refuse(module, "activation_scheme dynamic or static", scheme, 'choose "eager"')


def _check(module, hidden_states, needs=_NEEDS) -> Activation | str:
    """The activation of `module`. Raises NotImplementedError unless the kernel computes what it
    does, whatever the format of its weights.
    """
    for name, allowed, instead in needs:
        got = getattr(module, name, allowed)
        if got != allowed:
            refuse(module, f"{name} {allowed}", got, f'choose "{instead}"')
    if hidden_states.dtype != torch.bfloat16:
        got = dtype_of(hidden_states)
        refuse(module, "activations in bfloat16", got, "load the model with dtype=torch.bfloat16")
    return activation_of(module)
