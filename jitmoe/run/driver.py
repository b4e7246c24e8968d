"""The CUDA driver through cuda.bindings: checked calls, the current device, and what planning needs
of it.
"""

from __future__ import annotations

from functools import cache, lru_cache

from jitmoe.plan.gpu import GpuSpec, match_device


class DriverError(RuntimeError):
    """A CUDA driver call failed; the text names the call and the driver's error."""


def driver():
    """The `cuda.bindings.driver` module, imported on first use so that `import jitmoe` needs no
    driver.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise DriverError(
            "cuda-python is not installed; install jitmoe[cu12] or jitmoe[cu13], "
            "whichever your driver supports"
        ) from error
    return module


def call(function, *args):
    """Call a driver function and return its results without the status. Raises DriverError."""
    status, *results = function(*args)
    if status != 0:
        fail(function, status)
    return results[0] if len(results) == 1 else tuple(results)


def fail(function, status):
    """Raise the DriverError of a call that returned `status`."""
    module = driver()
    _, name = module.cuGetErrorName(status)
    _, text = module.cuGetErrorString(status)
    name = name.decode() if name else str(status)
    raise DriverError(f"{function.__name__}: {name} ({text.decode() if text else 'unknown'})")


def num_devices() -> int:
    """Number of CUDA devices; 0 without a driver or a GPU. Creates no context."""
    try:
        module = driver()
        call(module.cuInit, 0)
        return call(module.cuDeviceGetCount)
    except (DriverError, ImportError, RuntimeError, OSError):
        return 0


def driver_version() -> tuple[int, int]:
    """The CUDA version the driver supports, as (major, minor)."""
    version = call(driver().cuDriverGetVersion)
    return version // 1000, version % 1000 // 10


@lru_cache
def device_spec(device: int) -> GpuSpec:
    """The GpuSpec of CUDA device number `device`.

    Raises ValueError for a GPU no kernel exists for.
    """
    module = driver()
    call(module.cuInit, 0)
    handle = call(module.cuDeviceGet, device)
    attribute = module.CUdevice_attribute

    def get(name):
        return call(
            module.cuDeviceGetAttribute, getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle
        )

    major, minor = get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")
    name = call(module.cuDeviceGetName, 256, handle).split(b"\0")[0].decode()
    return match_device(
        name,
        f"sm_{major}{minor}{'a' if major >= 9 else ''}",
        get("MULTIPROCESSOR_COUNT"),
        get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def is_capturing(stream: int) -> bool:
    """Whether work on `stream` is being captured into a CUDA graph."""
    query, stream_type, none = _capture_query()
    status, state = query(stream_type(stream))
    if status != 0:
        fail(query, status)
    return state != none


@cache
def _capture_query():
    """Names that a call at every launch need not look up again."""
    module = driver()
    none = module.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return module.cuStreamIsCapturing, module.CUstream, none
