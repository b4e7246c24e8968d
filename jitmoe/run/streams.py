"""Streams of any library as addresses."""

from __future__ import annotations

from contextlib import contextmanager


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


@contextmanager
def on_stream(address: int):
    """CuPy's work goes to a stream made elsewhere, then where it went before: a `with` of CuPy's
    own forgets a stream that was chosen by `Stream.use` (CuPy 14.2).
    """
    import cupy

    before = cupy.cuda.get_current_stream()
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14's name
        stream = cupy.cuda.Stream.from_external(_CudaStream(address))
    else:
        stream = cupy.cuda.ExternalStream(address)
    stream.use()
    try:
        yield
    finally:
        before.use()


class _CudaStream:
    """The CUDA stream protocol: version and address."""

    def __init__(self, address: int):
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address
