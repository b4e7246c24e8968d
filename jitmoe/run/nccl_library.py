"""NCCL as nccl4py gives it, refused where it is missing or too old. Loading it needs no GPU."""

from __future__ import annotations

from types import ModuleType

# The first with ncclGetPeerDevicePointer, by which a window tells where peers' memory is mapped.
MIN_VERSION = (2, 29, 2)
_REMEDY = (
    f"pip install 'nvidia-nccl-cu13>={'.'.join(map(str, MIN_VERSION))}' (-cu12 for CUDA 12), or "
    "take a PeerGroup"
)


def load() -> ModuleType:
    """nccl.core. Raises ImportError without nccl4py, RuntimeError without a libnccl that serves."""
    try:
        import nccl.core as core
    except ImportError as error:
        raise ImportError(
            f"a NcclGroup needs nccl4py ({error}); pip install 'jitmoe[nccl]', or take a PeerGroup"
        ) from error
    library = core.get_version().libnccl
    if library is None:
        raise RuntimeError(f"nccl4py finds no libnccl.so.2; {_REMEDY}")
    if library.version.release < MIN_VERSION:
        raise RuntimeError(
            f"NCCL is {library.version} ({library.path}), and a NcclGroup needs "
            f"{'.'.join(map(str, MIN_VERSION))} or later; {_REMEDY}. The first libnccl that a "
            "process loads counts, also for PyTorch, which brings its own"
        )
    return core


def version() -> str:
    """Of the libnccl that is loaded. Raises as `load`."""
    return str(load().get_version().libnccl.version)
