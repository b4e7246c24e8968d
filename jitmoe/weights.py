"""ExpertWeights: checkpoint tensors as the kernel takes them, none copied but scales in e8m0."""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np

from jitmoe.fp8 import decode_e8m0
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.scales import kind_of, weight_strides
from jitmoe.plan.variant import SCALES, check_gate_up, check_scales
from jitmoe.run.arrays import (
    HOST,
    DeviceArray,
    check_array,
    check_dense,
    check_rows,
    host_view,
    view,
)


class Memo(dict):
    """What was worked out once. Forgets everything at `limit` entries: it is worked out again."""

    def __init__(self, limit: int):
        super().__init__()
        self._limit = limit

    def __setitem__(self, key, value):
        if len(self) >= self._limit and key not in self:
            self.clear()
        super().__setitem__(key, value)


class ExpertWeights:
    """Views of the experts' FP8 weights, validated once.

    w13        [num_experts, 2 * intermediate, hidden] e4m3 (or uint8 of the same bits): gate rows
               first, then up, or the reverse
    w2         [num_experts, hidden, intermediate] e4m3
    w13_scale  f32, value = code * scale: for each block of 128 x 128 weights, of shape
               [num_experts, ceil(2 * intermediate / 128), hidden / 128]; for each output channel,
               [num_experts, 2 * intermediate] or with a trailing 1; for each expert, [num_experts]
               or with trailing ones; or for each half of its rows, [num_experts, 2] or with a
               trailing 1
    w2_scale   of the same kind: [num_experts, hidden / 128, ceil(intermediate / 128)];
               [num_experts, hidden]; or [num_experts], the latter two also with trailing ones
    gate_up    "gate_first" or "up_first": the order of rows in w13 and of scales in w13_scale
    scales     "block", "channel" or "tensor": the kind of both (default: by their shapes, "block"
               where those of a tiny layer fit two)

    Scales may be in e8m0 too (or uint8 of the same bits): a copy of them in f32 is made here, which
    waits for the GPU, and later writes to them are not seen. All else is used in place.

    CuPy arrays, PyTorch tensors or anything that speaks `__cuda_array_interface__` or DLPack. Rows
    must be dense and start at multiples of 16 bytes; rows and experts may be strided. Four NumPy
    arrays are weights for `mega_moe(..., backend="emulated")`, which a GPU refuses. Raises
    TypeError for another host array or a mixture and ValueError, one sentence, for shapes, dtypes,
    strides or devices that do not fit.
    """

    def __init__(self, w13, w2, w13_scale, w2_scale, *, gate_up="gate_first", scales=None):
        check_gate_up(gate_up)
        check_scales("block" if scales is None else scales)
        self.gate_up = gate_up
        read = host_view if isinstance(w13, np.ndarray) else view
        self.w13, self.w2 = read(w13, "w13"), read(w2, "w2")
        w13_scale, self.w13_scale = _read_scale(w13_scale, "w13_scale", read)
        w2_scale, self.w2_scale = _read_scale(w2_scale, "w2_scale", read)
        self.tensors = (w13, w2, w13_scale, w2_scale)  # they keep the memory alive
        if len(self.w13.shape) != 3 or self.w13.shape[1] % 2:
            raise ValueError(
                "w13 must have shape [num_experts, 2 * intermediate, hidden], "
                f"got {list(self.w13.shape)}; stack the gate rows of each expert on its up rows"
            )
        self.num_experts, rows, self.hidden = self.w13.shape
        self.intermediate = rows // 2
        self.device = self.w13.device
        self.problem(0, 1)  # refuses sizes there is no kernel for
        e, h, i = self.num_experts, self.hidden, self.intermediate
        for name, shape in (("w13", (e, rows, h)), ("w2", (e, h, i))):
            remedy = "w13 and w2 must be of the same layer: transpose or slice one of them"
            check_array(getattr(self, name), name, shape, ("e4m3", "u8"), self.device, remedy)
            check_rows(getattr(self, name), name, 16)
        for scale, name in ((self.w13_scale, "w13_scale"), (self.w2_scale, "w2_scale")):
            check_array(scale, name, scale.shape, ("f32", "e8m0", "u8"), self.device, "")
        kinds = SCALES if scales is None else (scales,)
        self.scales = kind_of(self.w13_scale.shape, self.w2_scale.shape, e, h, i, kinds)
        if self.scales == "block":
            check_dense(self.w13_scale, "w13_scale")
            check_dense(self.w2_scale, "w2_scale")
        # What calls with these weights share (fused.py): plans, kernels and packed parameters; and
        # by their signatures, arguments that were found right.
        self.memo, self.calls = Memo(256), Memo(1024)

    @property
    def variant(self) -> dict[str, str]:
        """The fields of a call's `Variant` that weights decide."""
        return {"gate_up": self.gate_up, "scales": self.scales}

    @cached_property
    def scale_strides(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Of w13_scale and w2_scale, in elements: `jitmoe.plan.scales.weight_strides`."""
        return tuple(
            weight_strides(self.scales, scale.shape, scale.strides, self.intermediate)
            for scale in (self.w13_scale, self.w2_scale)
        )

    def problem(self, num_tokens: int, top_k: int) -> MoeProblem:
        """A call's sizes. Raises ValueError for those there is no kernel for."""
        return MoeProblem(num_tokens, self.hidden, self.intermediate, self.num_experts, top_k)

    def __repr__(self):
        device = "host" if self.device == HOST else self.device
        order = "" if self.gate_up == "gate_first" else f", gate_up={self.gate_up!r}"
        order += "" if self.scales == "block" else f", scales={self.scales!r}"
        return (
            f"ExpertWeights(num_experts={self.num_experts}, hidden={self.hidden}, "
            f"intermediate={self.intermediate}, device={device}{order})"
        )

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        codes = 3 * self.num_experts * self.hidden * self.intermediate
        return codes + 4 * sum(prod(s.shape) for s in (self.w13_scale, self.w2_scale))


def _read_scale(given, name: str, read):
    """A scale and what is seen of it, in f32 if it was in e8m0."""
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
