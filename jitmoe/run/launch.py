"""Kernel: a compiled plan loaded on a device, and its launch. Knows plans, not experts."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import partial

from jitmoe.jit.build import Built, build
from jitmoe.jit.params import layout
from jitmoe.plan.plan import Plan
from jitmoe.run.driver import call, device_spec, driver, fail

_FORMATS = {"i64": "q", "u64": "Q", "u32": "I", "i32": "i", "f32": "f"}

MAX_CONFIGS = 64  # remembered for a kernel: streams come and go


class Kernel:
    """One plan's kernel on one device; get it from `load`.

    `grid` is the number of blocks that fill the device: occupancy times SMs.
    """

    def __init__(self, built: Built, device: int):
        module = driver()
        plan = built.plan
        self.plan, self.key, self.origin = plan, built.key, built.origin
        self.device = device
        self._module = call(module.cuModuleLoadData, built.cubin.data)
        self.function = call(module.cuModuleGetFunction, self._module, plan.name.encode())
        smem = plan.smem.num_bytes
        call(
            module.cuFuncSetAttribute,
            self.function,
            module.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            smem,
        )
        blocks_per_sm = call(
            module.cuOccupancyMaxActiveBlocksPerMultiprocessor,
            self.function,
            plan.num_threads,
            smem,
        )
        self.grid = blocks_per_sm * device_spec(device).num_sms
        self._launch = module.cuLaunchKernelEx
        # By stream, kind and grid; threads share them and none writes.
        self._configs: dict[tuple[int, bool, int | None], object] = {}

    def _configure(self, stream: int, cooperative: bool, grid: int | None):
        module = driver()
        config = module.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid or self.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.plan.num_threads, 1, 1
        config.sharedMemBytes = self.plan.smem.num_bytes
        config.hStream = module.CUstream(stream)
        attribute, ids = module.CUlaunchAttribute(), module.CUlaunchAttributeID
        if cooperative:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        else:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        if len(self._configs) >= MAX_CONFIGS:
            self._configs.clear()
        self._configs[stream, cooperative, grid] = config
        return config

    def launch(
        self,
        params: ParamBlock | JoinedParams,
        stream: int,
        cooperative: bool,
        grid: int | None = None,
    ) -> None:
        """Launch on `stream` (an address) with the present contents of `params`.

        cooperative  all blocks are resident at once, for kernels whose blocks wait for all others;
                     else blocks start as those of the launch before end, if that lets them
                     (programmatic dependent launch, which overlaps no cooperative launch: H200,
                     driver 580)

        Raises DriverError.
        """
        key = (stream, cooperative, grid)
        config = self._configs.get(key) or self._configure(*key)
        (status,) = self._launch(config, self.function, params.pointers, 0)
        if status != 0:
            fail(self._launch, status)


class ParamBlock:
    """The packed parameter struct: tensor maps first, written once; then scalars, written as one
    record.
    """

    def __init__(self, plan: Plan):
        params = plan.params
        fields = layout(params)
        num_maps = sum(param.ctype == "TensorMap" for param in params)
        assert all(param.ctype == "TensorMap" for param in params[:num_maps]), (
            "tensor maps come first"
        )
        formats = [_FORMATS.get(p.ctype, "Q") for p in params[num_maps:]]
        self._record = struct.Struct("".join(formats))  # native alignment, as in the C struct
        self._offset = 128 * num_maps
        assert fields.num_bytes - self._offset - self._record.size < 64, (
            "the record is not the struct"
        )
        self._allocate(bytes(fields.num_bytes))

    def _allocate(self, contents: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(contents, len(contents))
        self._address = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self.pointers = ctypes.addressof(self._address)

    @property
    def contents(self) -> ctypes.Array:
        return self._buffer

    def copy(self) -> ParamBlock:
        """A block of its own with the present contents."""
        twin = ParamBlock.__new__(ParamBlock)
        twin._record, twin._offset = self._record, self._offset
        twin._allocate(self._buffer.raw)
        return twin

    def write_maps(self, *maps: bytes) -> None:
        ctypes.memmove(self._buffer, b"".join(maps), 128 * len(maps))

    def write(self, *values) -> None:
        """Every field after the tensor maps, in order."""
        self._record.pack_into(self._buffer, self._offset, *values)

    def address_writer(self, num_fields: int) -> Callable[..., None]:
        """A function that writes the first `num_fields` of these fields, which are addresses."""
        return partial(struct.Struct(f"{num_fields}Q").pack_into, self._buffer, self._offset)


class JoinedParams:
    """The parameters of a launch that serves several ranks: a struct each, in a row."""

    def __init__(self, blocks: list[ParamBlock]):
        self._blocks = blocks
        sizes = [len(block.contents) for block in blocks]
        self._buffer = ctypes.create_string_buffer(sum(sizes))
        self._address = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self.pointers = ctypes.addressof(self._address)

    def join(self) -> None:
        """Take over what the structs hold now."""
        address = self._address.value
        for block in self._blocks:
            ctypes.memmove(address, block.contents, len(block.contents))
            address += len(block.contents)


_kernels: dict[tuple[int, Plan], Kernel] = {}
_lock = threading.Lock()


def loaded(plan: Plan, device: int) -> Kernel | None:
    """The kernel of `plan` if it is on `device` already."""
    return _kernels.get((device, plan))


def load(plan: Plan, device: int) -> Kernel:
    """The kernel of `plan` on `device`, built and loaded on first use.

    The device's context must be current.
    """
    kernel = _kernels.get((device, plan))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((device, plan))
            if kernel is None:
                kernel = _kernels[device, plan] = Kernel(build(plan), device)
    return kernel
