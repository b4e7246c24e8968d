"""Streams of any library as addresses."""

from __future__ import annotations


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
