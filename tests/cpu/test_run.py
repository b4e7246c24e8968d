"""Launches and workspaces over a driver and a CuPy that only take notes."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from jitmoe import Workspace
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MoeProblem
from jitmoe.run import launch, streams, workspace

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
        kernel.launch(params, stream, True, grid)
    assert launches == [
        (132, "stream 5", 1),
        (132, "stream 6", 1),
        (132, "stream 5", 1),
        (1, "stream 5", 1),
        (132, "stream 6", 1),
    ]


class PinnedMemory(np.ndarray):
    ptr = 77


@pytest.fixture
def cupy(monkeypatch):
    def array(num_bytes, dtype):
        return SimpleNamespace(nbytes=num_bytes, data=SimpleNamespace(ptr=1 << 30))

    cuda = SimpleNamespace(
        Device=lambda device: nullcontext(),
        alloc_pinned_memory=lambda num_bytes: np.zeros(num_bytes, np.uint8).view(PinnedMemory),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
    )
    cupy = SimpleNamespace(cuda=cuda, uint8=np.uint8, zeros=array, empty=array)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(workspace, "is_capturing", lambda stream: False)
    monkeypatch.setattr(workspace, "on_stream", lambda stream: nullcontext())


def test_ready_launches_are_forgotten_when_memory_moves(cupy):
    memory = Workspace(device=0)
    memory.reserve(PLAN, 64, stream=0)
    memory.ready["a launch"] = "with addresses"
    memory.reserve(PLAN, 64, stream=0)
    assert memory.ready
    memory.reserve(PLAN, 65, stream=0)
    assert not memory.ready


@pytest.mark.parametrize("maker", ["from_external", "ExternalStream"])
def test_cupys_stream_is_the_chosen_one_again(monkeypatch, maker):
    """Also one that was chosen by `use`, and after an error."""

    class Stream:
        current = None

        def use(self):
            Stream.current = self

    cuda = SimpleNamespace(Stream=SimpleNamespace(), get_current_stream=lambda: Stream.current)
    setattr(cuda.Stream if maker == "from_external" else cuda, maker, lambda stream: Stream())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    chosen = Stream()
    chosen.use()
    with pytest.raises(KeyError), streams.on_stream(5):
        assert Stream.current is not chosen
        raise KeyError
    assert Stream.current is chosen
