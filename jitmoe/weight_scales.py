"""Weight scales as they are given, widened if they are in e8m0."""

from __future__ import annotations

from jitmoe.fp8 import decode_e8m0
from jitmoe.run.arrays import HOST, DeviceArray


def read_scale(given, name: str, read):
    """A scale, or None, and what is seen of it: in f32 if it was in e8m0 or uint8."""
    if given is None:
        return None, None
    seen = read(given, name)
    if seen.dtype not in ("e8m0", "u8"):
        return given, seen
    given = decode_e8m0(given) if seen.device == HOST else _decode_on_gpu(given, seen)
    return given, read(given, name)


def _decode_on_gpu(given, seen: DeviceArray):
    """A CuPy array. Waits for the GPU: what wrote the scales, or will read these, may be on any
    stream.
    """
    import cupy

    with cupy.cuda.Device(seen.device) as device:
        memory = cupy.cuda.UnownedMemory(seen.ptr, seen.layout.num_bytes, given, seen.device)
        place = cupy.cuda.MemoryPointer(memory, 0)
        bits = cupy.ndarray(seen.shape, cupy.uint8, place, strides=seen.strides)
        device.synchronize()
        scales = decode_e8m0(bits, cupy)
        device.synchronize()
    return scales
