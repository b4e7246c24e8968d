"""The layer as PyTorch operators, jitmoe::mega_moe and jitmoe::mega_moe_out, for torch.compile and
CUDA graphs.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch

from jitmoe import Activation, ExpertWeights
from jitmoe import mega_moe as launch
from jitmoe.integrations.torch_memory import Memory, host, host_weights
from jitmoe.integrations.torch_scales import f32, mx_codes, pack_scales, packed
from jitmoe.mxfp4 import FORMATS as MX_FORMATS

__all__ = ["MAX_LAYERS", "mega_moe", "pack_scales"]

MAX_LAYERS = 1024  # remembered; then the one not called for longest is read again

_INPUTS = ("x", "topk_ids", "topk_weights", "w13", "w2", "w13_scale", "w2_scale", "x_scale")
_INPUTS += ("w13_bias", "w2_bias")
_SCHEMA = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, "
    "Tensor? w13_scale=None, Tensor? w2_scale=None, Tensor? x_scale=None, "
    "Tensor? w13_bias=None, Tensor? w2_bias=None, "
    'str backend="cuda", str activation="swiglu", '
    "float? alpha=None, float? limit=None, float? up_offset=None, "
    "float routed_scaling_factor=1.0, bool apply_router_weight_on_input=False, "
    'int first_expert=0, str gate_up="gate_first", bool batch_invariant=False, '
    "str? format=None"
)
# From `activation` on: what the operators' defaults stand for.
_PLAIN = ("swiglu", None, None, None, 1.0, False, 0, "gate_first", False, None)


def mega_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: Activation | str = "swiglu",
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    first_expert: int = 0,
    gate_up: str = "gate_first",
    batch_invariant: bool = False,
    format: str | None = None,
    expert_counts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "cuda",
) -> torch.Tensor:
    """`jitmoe.mega_moe` as a PyTorch operator, on the current stream of the tensors' GPU.

    x             [num_tokens, hidden] bf16, or, for FP8 weights and mxfp4_fp8, e4m3 with an x_scale
                  of `jitmoe.mega_moe`
    topk_ids      [num_tokens, top_k] int32 or int64; an id outside [first_expert, first_expert +
                  num_experts) is an unused slot
    topk_weights  [num_tokens, top_k] f32 or bf16
    w13 to w2_scale  the tensors of `jitmoe.ExpertWeights`, used in place; scales may be e8m0 (or
                  uint8 of the same bits) as well, of which a copy, in f32 or for MXFP4 packed, is
                  kept with the tensor; bf16 weights have none. MXFP4 may be int8 or
                  float4_e2m1fn_x2 too, its scales int32 of `pack_scales`, which are used in place
    w13_bias, w2_bias, gate_up, format  as in `jitmoe.ExpertWeights`
    activation to first_expert, batch_invariant  as in `jitmoe.mega_moe`
    expert_counts [num_experts] int32, to which the routed pairs of each expert are added
    out           [num_tokens, hidden] bf16, written in place (default: a new tensor)
    backend       "cuda", or "emulated": tensors on the CPU, and the kernel thread by thread on it

    Returns `out`. Works in torch.compile(fullgraph=True) and, after one call on the stream of the
    capture, in a CUDA graph.

    Raises what `jitmoe.mega_moe` raises, and RuntimeError if an input requires grad while grad mode
    is on: there is no backward.
    """
    inputs = (x, topk_ids, topk_weights, w13, w2, w13_scale, w2_scale, x_scale)
    inputs += (w13_bias, w2_bias)
    layer = (
        *_fields(activation),
        routed_scaling_factor,
        apply_router_weight_on_input,
        first_expert,
        gate_up,
        batch_invariant,
        format,
    )
    options = (backend,) if layer == _PLAIN else (backend, *layer)  # a shorter call is a faster one
    # An operator that returns something new writes nothing else: those can have autograd formulas.
    if out is None and expert_counts is None and torch.compiler.is_compiling():
        return _new(*inputs, *options)
    if torch.is_grad_enabled():
        _refuse_grad(inputs)
    if out is None:  # this way in less than half the time, for it has no autograd formula
        out = x.new_empty(x.shape, dtype=torch.bfloat16)
    if expert_counts is None:
        _into(out, *inputs, *options)
    else:
        _into(out, *inputs, *options, expert_counts=expert_counts)
    return out


def _fields(activation) -> tuple:
    """kind, alpha, limit and up_offset, as an operator takes them."""
    if isinstance(activation, str):
        return activation, None, None, None
    activation = Activation.of(activation)  # refuses what is none
    return activation.kind, activation.alpha, activation.limit, activation.up_offset


# Not torch.library.custom_op, which takes 0.1 ms a call (PyTorch 2.11 and 2.13) unless in inference
# mode. An operator that writes takes no autograd formula, so `mega_moe` asks about grad.
_library = torch.library.Library("jitmoe", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(f"mega_moe({_SCHEMA}) -> Tensor", tags=_TAGS)
_library.define(
    f"mega_moe_out(Tensor(a!) out, {_SCHEMA}, Tensor(b!)? expert_counts=None) -> ()", tags=_TAGS
)


@torch.library.impl(_library, "mega_moe", "CompositeExplicitAutograd")
@torch.compiler.disable
def _mega_moe(x, *inputs, **options):
    out = x.new_empty(x.shape, dtype=torch.bfloat16)
    _run(out, x, *inputs, **options)
    return out


@torch.library.impl(_library, "mega_moe_out", "CompositeExplicitAutograd")
@torch.compiler.disable
def _mega_moe_out(out, *inputs, **options):
    for written in _run(out, *inputs, **options):
        if not written.is_inference():  # those have no version
            torch.autograd.graph.increment_version(written)


@torch.library.register_fake("jitmoe::mega_moe", lib=_library)
def _fake(x, *_):
    return x.new_empty(x.shape, dtype=torch.bfloat16)


@torch.library.register_fake("jitmoe::mega_moe_out", lib=_library)
def _fake_out(out, *_):
    return None


def _set_up_backward(ctx, inputs, output):
    _refuse_grad(inputs)


def _no_backward(ctx, grad):
    raise AssertionError("refused before")


torch.library.register_autograd(
    "jitmoe::mega_moe", _no_backward, setup_context=_set_up_backward, lib=_library
)
_new, _into = torch.ops.jitmoe.mega_moe.default, torch.ops.jitmoe.mega_moe_out.default


def _refuse_grad(inputs) -> None:
    """Raise RuntimeError if one of the inputs, in the order of the schema, requires grad."""
    asking = [
        name
        for name, value in zip(_INPUTS, inputs, strict=False)
        if value is not None and value.requires_grad
    ]
    if asking:
        raise RuntimeError(
            f"jitmoe::mega_moe has no backward, and grad is required of {', '.join(asking)}; "
            "call it under torch.no_grad() or torch.inference_mode(), or detach them"
        )


def _run(
    out,
    x,
    topk_ids,
    topk_weights,
    w13,
    w2,
    w13_scale=None,
    w2_scale=None,
    x_scale=None,
    w13_bias=None,
    w2_bias=None,
    backend="cuda",
    activation="swiglu",
    alpha=None,
    limit=None,
    up_offset=None,
    routed_scaling_factor=1.0,
    apply_router_weight_on_input=False,
    first_expert=0,
    gate_up="gate_first",
    batch_invariant=False,
    format=None,
    expert_counts=None,
) -> list[torch.Tensor]:
    """Launch; returns what was written."""
    if format in MX_FORMATS:
        weights = mx_codes(w13), mx_codes(w2)
        order = gate_up if w13.shape[1:2] != (2 * w2.shape[-1],) else None  # has no gate
        weights += (packed(w13_scale, "w13_scale", w13, format, order),)
        weights += (packed(w2_scale, "w2_scale", w2, format),)
    else:
        weights = w13, w2, f32(w13_scale), f32(w2_scale)
    if w13_bias is not None or w2_bias is not None:
        weights += (w13_bias, w2_bias)
    if backend == "emulated":
        read, weights = host, _wrap(host_weights, weights, gate_up, format)
    elif backend == "cuda":
        read, weights = _as_is, _known_weights(gate_up, format, *map(_place, weights))
    else:
        raise ValueError(f'backend must be "cuda" or "emulated", got {backend!r}')
    x = read(x, "x")
    rows = x if x_scale is None else (x, read(x_scale, "x_scale"))
    ids, router = read(topk_ids, "topk_ids"), read(topk_weights, "topk_weights")
    counts = None if expert_counts is None else read(expert_counts, "expert_counts")
    # A model may lie on several GPUs, of which one is current.
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        launch(
            rows,
            ids,
            router,
            weights,
            activation=_activation(activation, alpha, limit, up_offset),
            routed_scaling_factor=routed_scaling_factor,
            apply_router_weight_on_input=apply_router_weight_on_input,
            first_expert=first_expert,
            batch_invariant=batch_invariant,
            out=read(out, "out"),
            expert_counts=counts,
            backend=backend,
        )
    return [out] if expert_counts is None else [out, expert_counts]


@lru_cache
def _activation(kind: str, *numbers: float | None) -> Activation | str:
    return kind if numbers == (None, None, None) else Activation(kind, *numbers)


def _as_is(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor


def _place(tensor: torch.Tensor | None) -> tuple | None:
    """All that a kernel knows of a tensor of weights."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@lru_cache(MAX_LAYERS)
def _known_weights(gate_up: str, format: str | None, *places: tuple | None) -> ExpertWeights:
    """ExpertWeights of four places, or six with biases, made once for each.

    Made of the key alone, so it is right for whatever tensors lie there: checked layouts, plans,
    and tensor maps, which hold addresses and strides. Values are read by the kernel, so weights may
    be written; memory that was freed and given to another layer of the same layout serves that one.
    No tensor is held, so a model's memory is free as soon as its owner lets go of it.
    """
    return _wrap(Memory, places, gate_up, format)


def _wrap(read, weights: tuple, gate_up: str, format: str | None) -> ExpertWeights:
    """ExpertWeights of what `read` makes of each that is given, biases last."""
    names = (*_INPUTS[3:7], *_INPUTS[8:])
    arrays = [
        None if given is None else read(given, name)
        for given, name in zip(weights, names, strict=False)
    ]
    biases = dict(zip(names[4:], arrays[4:], strict=False))
    return ExpertWeights(*arrays[:4], **biases, gate_up=gate_up, format=format)
