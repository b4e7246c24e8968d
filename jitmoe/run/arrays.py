"""Device arrays of any family, seen through one small record: pointer, shape, strides, dtype,
device.
"""

from __future__ import annotations

from typing import NamedTuple

# One name for a format, whatever the library calls it. Unsigned views of a format's width stand for
# it.
_NAMES = {
    "float8_e4m3fn": "e4m3",
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


class DeviceArray(NamedTuple):
    """`strides` are in elements; `family` is "cupy", "torch" or "other"."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    family: str


def view(array, name: str) -> DeviceArray:
    """See `array` as a DeviceArray. Raises TypeError, naming the argument, for a host array or
    anything else.

    CuPy arrays, PyTorch tensors (read without importing PyTorch) and whatever speaks
    `__cuda_array_interface__` or DLPack are device arrays.
    """
    module = type(array).__module__
    if module.startswith("torch"):
        if not array.is_cuda:
            raise TypeError(
                f"{name} must be on a GPU, got a tensor on {array.device}; move it with .cuda()"
            )
        dtype = str(array.dtype)[6:]
        return DeviceArray(
            array.data_ptr(),
            tuple(array.shape),
            array.stride(),
            _NAMES.get(dtype, dtype),
            array.device.index,
            "torch",
        )
    if module.startswith("cupy"):
        return _view_cupy(array, "cupy")
    if module.startswith("numpy") or isinstance(array, (list, tuple, int, float)) or array is None:
        raise TypeError(
            f"{name} must be a GPU array, got {type(array).__module__}.{type(array).__name__}; "
            "copy it with cupy.asarray or torch.as_tensor(..., device='cuda')"
        )
    import cupy

    try:
        if hasattr(array, "__cuda_array_interface__"):
            return _view_cupy(cupy.asarray(array), "other")
        return _view_cupy(cupy.from_dlpack(array), "other")
    except Exception as error:
        raise TypeError(
            f"{name} must be a GPU array (CuPy, PyTorch, or one that speaks "
            f"__cuda_array_interface__ or DLPack), "
            f"got {type(array).__module__}.{type(array).__name__}: {error}"
        ) from error


def _view_cupy(array, family: str) -> DeviceArray:
    itemsize = array.itemsize
    dtype = array.dtype
    name = _numpy_names.get(dtype)
    if name is None:  # the name of a NumPy dtype takes longer to make than all the rest
        name = _numpy_names[dtype] = _NAMES.get(dtype.name, dtype.name)
    data = array.data
    strides = tuple([stride // itemsize for stride in array.strides])
    return DeviceArray(data.ptr, array.shape, strides, name, data.device_id, family)


_numpy_names: dict = {}


def check_array(
    got: DeviceArray, name: str, shape: tuple, dtypes: tuple[str, ...], device: int
) -> None:
    """Raise ValueError, in one sentence, unless shape, dtype and device are as wanted; `None` is
    any size.
    """
    if got.dtype not in dtypes:
        raise ValueError(
            f"{name} must have dtype {' or '.join(dtypes)}, got {got.dtype}; convert or view it"
        )
    if len(got.shape) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, got.shape, strict=True)
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(got.shape)}")
    if got.device != device:
        raise ValueError(
            f"{name} is on GPU {got.device}, the weights are on GPU {device}; move one of them"
        )


def check_rows(got: DeviceArray, name: str, align_elements: int) -> None:
    """Raise ValueError unless the last dimension is dense and every row starts at a multiple of 16
    bytes.
    """
    if got.shape[-1] > 1 and got.strides[-1] != 1:
        raise ValueError(
            f"{name} must be dense in its last dimension, "
            f"got strides {list(got.strides)}; make it contiguous"
        )
    outer = [s for s, n in zip(got.strides[:-1], got.shape[:-1], strict=True) if n > 1]
    if got.ptr % 16 or any(stride % align_elements or stride < 0 for stride in outer):
        raise ValueError(
            f"rows of {name} must start at multiples of 16 bytes, "
            f"got address {got.ptr:#x} and strides {list(got.strides)}; copy it"
        )


def empty_rows(num_rows: int, num_columns: int, like, family: str, device: int):
    """A new [num_rows, num_columns] bf16 array of the family of `like`."""
    if family == "torch":
        import torch

        return torch.empty((num_rows, num_columns), dtype=torch.bfloat16, device=like.device)
    import cupy

    with cupy.cuda.Device(device):
        return cupy.empty((num_rows, num_columns), dtype=_cupy_bf16())


def _cupy_bf16():
    """CuPy's bf16 where it has one (14 and later), else uint16 of the same bits."""
    import cupy
    import ml_dtypes
    import numpy

    if int(cupy.__version__.split(".")[0]) >= 14:
        return numpy.dtype(ml_dtypes.bfloat16)
    return numpy.dtype(numpy.uint16)


def current_stream(family: str, device: int) -> int:
    """The stream the caller's library would use now, as an address."""
    if family == "torch":
        import torch

        return torch.cuda.current_stream(device).cuda_stream
    import cupy

    return cupy.cuda.get_current_stream(device).ptr


def stream_address(stream) -> int:
    """The address of a stream given as an int, a CuPy or PyTorch stream, or `__cuda_stream__`."""
    if isinstance(stream, int):
        return stream
    for attribute in ("ptr", "cuda_stream"):
        if hasattr(stream, attribute):
            return getattr(stream, attribute)
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    raise TypeError(
        f"stream must be an address or a CuPy or PyTorch stream, got {type(stream).__name__}"
    )
