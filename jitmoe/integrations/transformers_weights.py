"""Weights of experts modules as the kernel takes them: [num_experts, rows, k], k dense."""

from __future__ import annotations

import torch

from jitmoe.integrations.transformers_gates import has_gate
from jitmoe.integrations.transformers_refusals import named


def w13_of(module) -> str:
    """The name of gate and up, or of the one projection of experts without a gate."""
    return "gate_up_proj" if has_gate(module) else "up_proj"


def rows_of(module, name: str) -> torch.Tensor:
    """The weights `name` of `module`, in its own memory.

    Those of a transposed module, [num_experts, k, rows], are laid out anew at the first call: the
    parameter keeps its shape, values and identity, its memory is then k by k of a row. Nothing is
    held twice afterwards; during it there is room needed for one more such parameter. A parameter
    that is given another memory later is laid out again.

    Raises RuntimeError where that cannot be done: while torch.compile traces, or a CUDA graph is
    captured.
    """
    parameter = getattr(module, name)
    if not module.is_transposed:
        return parameter
    if parameter.stride(1) != 1:
        _lay_out(module, name, parameter)
    return parameter.transpose(1, 2)


def _lay_out(module, name: str, parameter: torch.Tensor) -> None:
    is_cuda = parameter.is_cuda
    during = (
        "torch.compile(fullgraph=True)"
        if torch.compiler.is_compiling()
        else "the capture of a CUDA graph"
        if is_cuda and torch.cuda.is_current_stream_capturing()
        else None
    )
    if during is not None:
        raise RuntimeError(
            f"{named(module)}: {name} is transposed and must be laid out anew once, which cannot "
            f"be done during {during}; call the model before it"
        )
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        rows = parameter.detach().transpose(1, 2).contiguous()
        if is_cuda:  # other streams may use either, and the old memory goes
            torch.cuda.synchronize(parameter.device)
        parameter.data = rows.transpose(1, 2)
