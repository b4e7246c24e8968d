"""Arrays on a GPU of any family, and NumPy's for emulation, seen through one small record: address
and layout.

What follows from shape, strides, dtype and device is worked out once for each combination and
shared. On the path of every call, signatures tell combinations apart at the least cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

HOST = -1  # the device of a NumPy array

# One name for a format, whatever the library calls it. Unsigned views of a format's width stand for
# it.
_NAMES = {
    "float8_e4m3fn": "e4m3",
    "float8_e8m0fnu": "e8m0",
    "bfloat16": "bf16",
    "float32": "f32",
    "float16": "f16",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "int8": "i8",
}


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """All of an array but its address. Arrays that agree in it share one, known by identity.

    `strides` are in elements, `num_bytes` reaches from the first element to the end of the last,
    `family` is "cupy", "torch", "numpy" or "other".
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    family: str
    num_bytes: int


class DeviceArray(NamedTuple):
    """An array's address and layout."""

    ptr: int
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.layout.strides

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def device(self) -> int:
        return self.layout.device

    @property
    def family(self) -> str:
        return self.layout.family


def view(array, name: str) -> DeviceArray:
    """See `array` as a DeviceArray. Raises TypeError, naming the argument, for a host array or
    anything else.

    CuPy arrays, PyTorch tensors (read without importing PyTorch) and whatever speaks
    `__cuda_array_interface__` or DLPack are device arrays.
    """
    return _reader(type(array))(array, name)


def host_view(array, name: str) -> DeviceArray:
    """See a NumPy array as a DeviceArray on HOST, for emulation. Raises TypeError, naming the
    argument, for anything else.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f'{name} must be a NumPy array for backend="emulated", got {_kind(array)}; '
            "copy it into one"
        )
    key = (array.shape, array.strides, array.dtype, HOST, "numpy")
    layout = _layouts.get(key)
    if layout is None:
        dtype = array.dtype.name if array.dtype.isnative else array.dtype.str
        strides = [stride // array.itemsize for stride in array.strides]
        layout = _layout(key, strides, dtype, array.itemsize, HOST, "numpy")
    return DeviceArray(array.ctypes.data, layout)


_layouts: dict[tuple, Layout] = {}
_MAX_LAYOUTS = 8192  # token counts come and go


@cache
def signer(kind: type) -> Callable[[object, str], tuple[int, Hashable]]:
    """What turns an array of a type, and an argument's name, into address and signature: arrays of
    equal signatures have equal layouts, though `view` may refuse both.
    """
    reader = _reader(kind)
    return {_read_torch: _sign_torch, _read_cupy: _sign_cupy}.get(reader, reader)


def _sign_torch(array, name: str) -> tuple[int, tuple]:
    return array.data_ptr(), (array.shape, array.stride(), array.dtype, array.device)


def _sign_cupy(array, name: str) -> tuple[int, tuple]:
    data = array.data
    return data.ptr, (array.shape, array.strides, array.dtype, data.device_id)


@cache
def _reader(kind: type) -> Callable:
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "torch" in packages:
        return _read_torch
    if "cupy" in packages:
        return _read_cupy
    if "numpy" in packages or issubclass(kind, (list, tuple, int, float, type(None))):
        return _refuse_host
    return _read_other


def _read_torch(array, name: str) -> DeviceArray:
    key = (array.shape, array.stride(), array.dtype, array.device)
    layout = _layouts.get(key)
    if layout is None:
        if not array.is_cuda:
            raise TypeError(
                f"{name} must be on a GPU, got a tensor on {array.device}; move it with .cuda()"
            )
        dtype = str(array.dtype).removeprefix("torch.")
        layout = _layout(key, key[1], dtype, array.element_size(), array.device.index, "torch")
    return DeviceArray(array.data_ptr(), layout)


def _read_cupy(array, name: str, family: str = "cupy") -> DeviceArray:
    data = array.data
    key = (array.shape, array.strides, array.dtype, data.device_id, family)
    layout = _layouts.get(key)
    if layout is None:
        itemsize = array.itemsize
        strides = [stride // itemsize for stride in array.strides]
        layout = _layout(key, strides, array.dtype.name, itemsize, data.device_id, family)
    return DeviceArray(data.ptr, layout)


def _read_other(array, name: str) -> DeviceArray:
    kind = _kind(array)
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{name} is a {kind}, which is read through CuPy, and CuPy is not installed; "
            "pip install 'jitmoe[cu12]', or pass PyTorch tensors"
        ) from error
    try:
        speaks = hasattr(array, "__cuda_array_interface__")
        return _read_cupy(cupy.asarray(array) if speaks else cupy.from_dlpack(array), name, "other")
    except Exception as error:
        raise TypeError(
            f"{name} must be a GPU array (CuPy, PyTorch, or one that speaks "
            f"__cuda_array_interface__ or DLPack), got {kind}: {error}"
        ) from error


def _refuse_host(array, name: str) -> DeviceArray:
    raise TypeError(
        f"{name} must be a GPU array, got {_kind(array)}; "
        "copy it with cupy.asarray or torch.as_tensor(..., device='cuda'), "
        'or run the layer on NumPy arrays alone with backend="emulated"'
    )


def _kind(array) -> str:
    return f"{type(array).__module__}.{type(array).__name__}"


def _layout(key, strides, dtype: str, itemsize: int, device: int, family: str) -> Layout:
    shape = tuple(key[0])
    extent = 0
    if all(shape):
        reach = (abs(stride) * (n - 1) for stride, n in zip(strides, shape, strict=True))
        extent = itemsize * (1 + sum(reach))
    if len(_layouts) >= _MAX_LAYOUTS:
        _layouts.clear()
    dtype = _NAMES.get(dtype, dtype)
    return _layouts.setdefault(key, Layout(shape, tuple(strides), dtype, device, family, extent))


def check_array(
    got: DeviceArray,
    name: str,
    shape: tuple,
    dtypes: tuple[str, ...],
    device: int,
    remedy: str,
    whose: str = "weights",
) -> None:
    """Raise ValueError, in one sentence, unless shape, dtype and device are as wanted; `None` is
    any size. `remedy` says what to do about a wrong shape, `whose` the device is.
    """
    if got.dtype not in dtypes:
        raise ValueError(
            f"{name} must have dtype {' or '.join(dtypes)}, got {got.dtype}; convert or view it"
        )
    if len(got.shape) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, got.shape, strict=True)
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(got.shape)}; {remedy}")
    if got.device != device:
        verb = "are" if whose.endswith("s") else "is"
        raise ValueError(
            f"{name} is on GPU {got.device}, the {whose} {verb} on GPU {device}; move one of them"
        )


def check_dense(got: DeviceArray, name: str) -> None:
    """Raise ValueError unless the last dimension is dense. Empty arrays may have any strides."""
    if all(got.shape) and got.shape[-1] > 1 and got.strides[-1] != 1:
        raise ValueError(
            f"{name} must be dense in its last dimension, "
            f"got strides {list(got.strides)}; make it contiguous"
        )


def check_contiguous(got: DeviceArray, name: str) -> None:
    """Raise ValueError unless elements follow each other in C order. Empty arrays may have any
    strides.
    """
    dense = 1
    for stride, n in zip(reversed(got.strides), reversed(got.shape), strict=True):
        if n > 1 and stride != dense and all(got.shape):
            raise ValueError(
                f"{name} must be contiguous, got strides {list(got.strides)}; make it contiguous"
            )
        dense *= n


def check_rows(got: DeviceArray, name: str, align_elements: int) -> None:
    """Raise ValueError unless rows are dense and start at multiples of 16 bytes."""
    check_dense(got, name)
    if not all(got.shape):
        return
    outer = [s for s, n in zip(got.strides[:-1], got.shape[:-1], strict=True) if n > 1]
    if got.ptr % 16 or any(stride % align_elements or stride < 0 for stride in outer):
        raise ValueError(
            f"rows of {name} must start at multiples of 16 bytes, "
            f"got address {got.ptr:#x} and strides {list(got.strides)}; copy it"
        )
