"""ExpertWeights: checkpoint tensors as the kernel takes them. Nothing is copied."""

from __future__ import annotations

from functools import cached_property

from jitmoe.plan.problem import QUANT_GROUP, MoeProblem
from jitmoe.run.arrays import check_array, check_rows, view


class ExpertWeights:
    """Views of the experts' block-quantised FP8 weights, validated once.

    w13        [num_experts, 2 * intermediate, hidden] e4m3 (or uint8 of the same bits): gate rows
               first, then up
    w2         [num_experts, hidden, intermediate] e4m3
    w13_scale  [num_experts, ceil(2 * intermediate / 128), hidden / 128] f32: block scales, value =
               code * scale
    w2_scale   [num_experts, hidden / 128, ceil(intermediate / 128)] f32

    CuPy arrays, PyTorch tensors or anything that speaks `__cuda_array_interface__` or DLPack. Rows
    must be dense and start at multiples of 16 bytes; rows and experts may be strided. Raises
    TypeError for a host array and ValueError, one sentence, for shapes, dtypes, strides or devices
    that do not fit.
    """

    def __init__(self, w13, w2, w13_scale, w2_scale):
        self.w13, self.w2 = view(w13, "w13"), view(w2, "w2")
        self.w13_scale, self.w2_scale = view(w13_scale, "w13_scale"), view(w2_scale, "w2_scale")
        self._owners = (w13, w2, w13_scale, w2_scale)  # keep the memory alive
        if len(self.w13.shape) != 3 or self.w13.shape[1] % 2:
            raise ValueError(
                "w13 must have shape [num_experts, 2 * intermediate, hidden], "
                f"got {list(self.w13.shape)}"
            )
        self.num_experts, rows, self.hidden = self.w13.shape
        self.intermediate = rows // 2
        self.device = self.w13.device
        # Refuses unsupported sizes.
        MoeProblem(0, self.hidden, self.intermediate, self.num_experts, 1)
        codes, e, h = ("e4m3", "u8"), self.num_experts, self.hidden
        check_array(self.w13, "w13", (e, rows, h), codes, self.device)
        check_array(self.w2, "w2", (e, h, self.intermediate), codes, self.device)
        blocks_13, blocks_h, blocks_i = (-(-n // QUANT_GROUP) for n in (rows, h, self.intermediate))
        check_array(self.w13_scale, "w13_scale", (e, blocks_13, blocks_h), ("f32",), self.device)
        check_array(self.w2_scale, "w2_scale", (e, blocks_h, blocks_i), ("f32",), self.device)
        for name in ("w13", "w2"):
            check_rows(getattr(self, name), name, 16)
        for name in ("w13_scale", "w2_scale"):
            scale = getattr(self, name)
            if scale.shape[-1] > 1 and scale.strides[-1] != 1:
                raise ValueError(
                    f"{name} must be dense in its last dimension, "
                    f"got strides {list(scale.strides)}; make it contiguous"
                )
        # Plans, kernels and packed parameters of calls with these weights (fused.py).
        self.memo: dict = {}

    def __repr__(self):
        return (
            f"ExpertWeights(num_experts={self.num_experts}, hidden={self.hidden}, "
            f"intermediate={self.intermediate}, device={self.device})"
        )

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        codes = 3 * self.num_experts * self.hidden * self.intermediate
        return codes + 4 * sum(
            s.shape[0] * s.shape[1] * s.shape[2] for s in (self.w13_scale, self.w2_scale)
        )
