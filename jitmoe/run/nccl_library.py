"""NCCL as nccl4py gives it, refused where it is missing or too old. Loading it needs no GPU."""

from __future__ import annotations

from types import ModuleType

# The first with ncclGetPeerDevicePointer, by which a window tells where peers' memory is mapped.
MIN_VERSION = (2, 29, 2)
# The first with the device library that kernels are linked with, and strong signals at addresses.
RAIL_VERSION = (2, 32)


def load() -> ModuleType:
    """nccl.core. Raises ImportError without nccl4py, RuntimeError without a libnccl that serves."""
    try:
        import nccl.core as core
    except ImportError as error:
        raise ImportError(
            f"a NcclGroup needs nccl4py ({error}); pip install 'jitmoe[nccl]', or take a PeerGroup"
        ) from error
    _check(core, MIN_VERSION, "a NcclGroup", "take a PeerGroup")
    return core


def check_rail() -> None:
    """Raise RuntimeError for a libnccl that is too old for ranks of several nodes. Raises as
    `load`, too.
    """
    who = "a NcclGroup over several nodes"
    _check(load(), RAIL_VERSION, who, "make a group of each NVLink domain")


def _check(core: ModuleType, least: tuple[int, ...], who: str, instead: str) -> None:
    text = ".".join(map(str, least))
    remedy = f"pip install 'nvidia-nccl-cu13>={text}' (-cu12 for CUDA 12), or {instead}"
    library = core.get_version().libnccl
    if library is None:
        raise RuntimeError(f"nccl4py finds no libnccl.so.2; {remedy}")
    if library.version.release < least:
        raise RuntimeError(
            f"NCCL is {library.version} ({library.path}), and {who} needs {text} or later; "
            f"{remedy}. The first libnccl that a process loads counts, also for PyTorch, which "
            "brings its own"
        )


def version() -> str:
    """Of the libnccl that is loaded. Raises as `load`."""
    return str(load().get_version().libnccl.version)
