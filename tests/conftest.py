"""Marks and skips by folder, and a kernel cache of the test run's own."""

from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """A cache directory shared by the tests of this run; the user's own is never touched."""
    patch = pytest.MonkeyPatch()
    for name in ("JITMOE_NO_CACHE", "JITMOE_DUMP", "JITMOE_LINEINFO"):
        patch.delenv(name, raising=False)
    directory = tmp_path_factory.mktemp("kernels")
    patch.setenv("JITMOE_CACHE_DIR", str(directory))
    patch.setenv("JITMOE_TUNED", "off")  # tests of plans mean the heuristic's
    yield directory
    patch.undo()


@cache
def num_hoppers() -> int:
    """GPUs that kernels exist for, of those the driver numbers first."""
    from jitmoe.run.driver import DriverError, device_spec, num_devices

    count = 0
    for device in range(num_devices()):
        try:
            arch = device_spec(device).arch
        except (ValueError, DriverError):
            break
        if arch != "sm_90a":
            break
        count += 1
    return count


def pytest_collection_modifyitems(items):
    needed = {"gpu": 1, "multi_gpu": 2}
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder not in needed:
            continue
        item.add_marker(getattr(pytest.mark, folder))
        if num_hoppers() < needed[folder]:
            reason = f"needs {needed[folder]} Hopper GPU(s), found {num_hoppers()}"
            item.add_marker(pytest.mark.skip(reason=reason))
