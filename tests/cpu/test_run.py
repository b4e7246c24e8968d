"""Launches over a driver that only takes notes."""

from types import SimpleNamespace

import pytest

from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem
from jitmoe.run import launch

PLAN = choose(MoeProblem(8, 512, 192, 4, 2), gpu_spec("h200"))


@pytest.fixture
def launches(monkeypatch):
    """(grid, stream, cooperative) of every launch."""
    launches = []

    def launch_kernel(config, function, pointers, extra):
        (attribute,) = config.attrs
        launches.append((config.gridDimX, config.hStream, attribute.value.cooperative))
        return (0,)

    driver = SimpleNamespace(
        cuModuleLoadData=lambda data: (0, "module"),
        cuModuleGetFunction=lambda module, name: (0, "function"),
        cuFuncSetAttribute=lambda *_: (0,),
        cuOccupancyMaxActiveBlocksPerMultiprocessor=lambda *_: (0, 1),
        cuLaunchKernelEx=launch_kernel,
        CUlaunchConfig=SimpleNamespace,
        CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace()),
        CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
        CUstream=lambda address: f"stream {address}",
    )
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(launch, "device_spec", lambda device: gpu_spec("h200"))
    return launches


def test_streams_and_grids_have_configurations_of_their_own(launches, monkeypatch):
    """Threads that launch on two streams at once must not write to one."""
    monkeypatch.setattr(launch, "MAX_CONFIGS", 2)
    built = SimpleNamespace(plan=PLAN, key="", origin="", cubin=SimpleNamespace(data=b""))
    kernel, params = launch.Kernel(built, 0), SimpleNamespace(pointers=0)
    for stream, grid in ((5, None), (6, None), (5, None), (5, 1), (6, None)):
        kernel.launch(params, stream, grid)
    assert launches == [
        (132, "stream 5", 1),
        (132, "stream 6", 1),
        (132, "stream 5", 1),
        (1, "stream 5", 1),
        (132, "stream 6", 1),
    ]
