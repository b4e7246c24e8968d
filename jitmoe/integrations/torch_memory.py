"""A tensor of weights on a GPU as `ExpertWeights` reads it, without a hold on the tensor."""

from __future__ import annotations

import torch

_TYPES = {
    torch.float8_e4m3fn: ("|u1", 1),
    torch.uint8: ("|u1", 1),
    torch.bfloat16: ("<u2", 2),
    torch.uint16: ("<u2", 2),
}
_SCALE_TYPES = {torch.float32: ("<f4", 4)}


class Memory:
    """Of its place: address, shape, strides, dtype and device."""

    def __init__(self, place: tuple, name: str):
        address, shape, strides, dtype, device = place
        if device.type != "cuda":
            raise TypeError(
                f'{name} must be on a GPU for backend="cuda", got a tensor on {device}; move it '
                'with .cuda(), or run the kernel on this CPU with backend="emulated"'
            )
        types = _SCALE_TYPES if "scale" in name else _TYPES
        if dtype not in types:
            raise ValueError(
                f"{name} must have dtype {'f32' if 'scale' in name else 'e4m3, u8, bf16 or u16'}, "
                f"got {str(dtype).removeprefix('torch.')}; convert or view it"
            )
        typestr, itemsize = types[dtype]
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(stride * itemsize for stride in strides),
            "typestr": typestr,
        }
