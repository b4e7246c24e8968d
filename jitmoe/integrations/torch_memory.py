"""Tensors as the door reads them: on the CPU, and weights on a GPU by their places alone."""

from __future__ import annotations

import ml_dtypes
import torch

_TYPES = {
    torch.float8_e4m3fn: ("|u1", 1),
    torch.uint8: ("|u1", 1),
    torch.bfloat16: ("<u2", 2),
    torch.uint16: ("<u2", 2),
}
_F32 = {torch.float32: ("<f4", 4)}
_SCALE_TYPES = _F32 | {torch.int32: ("<i4", 4)}  # packed ones of MXFP4
_BIAS_TYPES = {dtype: _TYPES[dtype] for dtype in (torch.bfloat16, torch.uint16)} | _F32


class Memory:
    """A tensor of weights on a GPU, by its place: address, shape, strides, dtype and device."""

    def __init__(self, place: tuple, name: str):
        address, shape, strides, dtype, device = place
        if device.type != "cuda":
            raise TypeError(
                f'{name} must be on a GPU for backend="cuda", got a tensor on {device}; move it '
                'with .cuda(), or run the kernel on this CPU with backend="emulated"'
            )
        types, allowed = _TYPES, "e4m3, u8, bf16 or u16"
        if "scale" in name:
            types, allowed = _SCALE_TYPES, "f32"
        elif "bias" in name:
            types, allowed = _BIAS_TYPES, "bf16, u16 or f32"
        if dtype not in types:
            raise ValueError(
                f"{name} must have dtype {allowed}, got {str(dtype).removeprefix('torch.')}; "
                "convert or view it"
            )
        typestr, itemsize = types[dtype]
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(stride * itemsize for stride in strides),
            "typestr": typestr,
        }


def host(tensor: torch.Tensor | None, name: str):
    """A tensor on the CPU as a NumPy array of the same memory, by ml_dtypes where NumPy has no such
    type.
    """
    if tensor is None:
        return None
    if tensor.device.type != "cpu":
        raise TypeError(
            f'{name} must be on the CPU for backend="emulated", got a tensor on {tensor.device}; '
            'move it with .cpu(), or leave backend="cuda"'
        )
    tensor = tensor.detach()
    kind = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    if kind is None:
        return tensor.numpy()
    bits = torch.uint8 if tensor.element_size() == 1 else torch.uint16
    return tensor.view(bits).numpy().view(kind)


def host_weights(tensor: torch.Tensor | None, name: str):
    """As `host`, but of a copy where a tensor begins between multiples of 16 bytes, as those of a
    checkpoint mapped from its file do.
    """
    if tensor is not None and tensor.device.type == "cpu" and tensor.data_ptr() % 16:
        tensor = tensor.clone()
    return host(tensor, name)
