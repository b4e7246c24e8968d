"""Weight scales as kernels take them: in f32, or MXFP4's in an order of the kernel's own."""

from __future__ import annotations

from collections.abc import Callable

from jitmoe.fp8 import decode_e8m0
from jitmoe.mxfp4 import pack_scales, packed_shape
from jitmoe.plan.problem import MX_GROUP
from jitmoe.run.arrays import HOST, DeviceArray, check_array, check_contiguous, check_rows

_PACKED = ("i32", "u32")


def read_scale(given, name: str, read):
    """A scale, or None, and what is seen of it: in f32 if it was in e8m0 or uint8."""
    if given is None:
        return None, None
    seen = read(given, name)
    if seen.dtype not in ("e8m0", "u8"):
        return given, seen
    given = _work_out(given, seen, decode_e8m0)
    return given, read(given, name)


def read_mx_scale(
    given, name: str, shape: tuple, read, device: int, format: str, gate_up: str | None
):
    """What `mxfp4.pack_scales` makes of a scale in e8m0 or uint8 of `shape`, and what is seen of
    it; one that it has made already is taken as it is.
    """
    seen, remedy = read(given, name), f"pass a scale for each {MX_GROUP} weights of a row"
    if seen.dtype in _PACKED:
        packed = packed_shape(*shape[:2], shape[2] * MX_GROUP, format, gate_up)
        check_array(seen, name, packed, _PACKED, device, f"{remedy}, or pack it for this gate_up")
        check_contiguous(seen, name)
        check_rows(seen, name, 4)
        return given, seen
    check_array(seen, name, shape, ("e8m0", "u8"), device, remedy)
    try:
        packed = _work_out(given, seen, lambda codes, xp: pack_scales(codes, format, gate_up, xp))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return packed, read(packed, name)


def _work_out(given, seen: DeviceArray, function: Callable):
    """A new array of function(codes, xp) of 1-byte codes, where they are. On a GPU it waits: what
    wrote the scales, or will read these, may be on any stream.
    """
    if seen.device == HOST:
        import numpy

        return function(given.view(numpy.uint8), numpy)
    import cupy

    with cupy.cuda.Device(seen.device) as device:
        memory = cupy.cuda.UnownedMemory(seen.ptr, seen.layout.num_bytes, given, seen.device)
        place = cupy.cuda.MemoryPointer(memory, 0)
        codes = cupy.ndarray(seen.shape, cupy.uint8, place, strides=seen.strides)
        device.synchronize()
        result = function(codes, cupy)
        device.synchronize()
    return result
