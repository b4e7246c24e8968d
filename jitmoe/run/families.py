"""Arrays for the caller, of the library that it uses."""

from __future__ import annotations

from functools import cache

import numpy as np


def empty_rows(num_rows: int, num_columns: int, like, family: str, device: int):
    """A new [num_rows, num_columns] bf16 array of the family of `like`."""
    if family == "torch":
        import torch

        return torch.empty((num_rows, num_columns), dtype=torch.bfloat16, device=like.device)
    import cupy

    with cupy.cuda.Device(device):
        return cupy.empty((num_rows, num_columns), dtype=_cupy_bf16())


def as_family(array, family: str, dtype: str | None = None):
    """A CuPy array as one of `family`, over the same memory. `dtype` e4m3 or bf16 says what its
    uint8 or uint16 elements mean.
    """
    if family == "torch":
        import torch

        tensor = torch.from_dlpack(array)
        names = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
        return tensor if dtype is None else tensor.view(names[dtype])
    return array.view(_cupy_bf16()) if dtype == "bf16" else array


@cache
def _cupy_bf16():
    """CuPy's bf16 where it has one (14 and later), else uint16 of the same bits."""
    import cupy
    import ml_dtypes

    if int(cupy.__version__.split(".")[0]) >= 14:
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(np.uint16)
