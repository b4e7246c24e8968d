"""The fused layer on NumPy arrays, emulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jitmoe.emulate.compile import executable
from jitmoe.emulate.run import Array, Rank, TensorMap, launch
from jitmoe.mxfp4 import pack_scales
from jitmoe.plan.formats import format_of
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.scales import token_strides, weight_strides
from jitmoe.plan.spread import stride
from jitmoe.plan.variant import DEFAULT, Variant, is_gated
from jitmoe.reference import Layer
from jitmoe.reference_biases import Biases

_TIMEOUT_US = 30_000_000


class Call(NamedTuple):
    """Arguments of a launch.

    x             [num_tokens, hidden] bf16 bits (uint16), or (e4m3 codes uint8, scales f32), which
                  bf16 weights do not take
    topk_ids      [num_tokens, top_k] int32 or int64
    topk_weights  [num_tokens, top_k] float32 or bf16 bits
    late          by name (x, x_scale, topk_ids, topk_weights) what some of them are replaced by
                  when all that came before the launch is over: arrays of the same layout
    variant       numbers of the activation; what it says else must be in the plan
    """

    x: np.ndarray | tuple[np.ndarray, np.ndarray]
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    late: Mapping[str, np.ndarray] = MappingProxyType({})
    variant: Variant = DEFAULT


class EmulatedLayer:
    """A layer, its kernel and its workspace: what outlives a launch.

    plan        a MegaMoePlan of the layer's sizes
    layer       weights in the plan's format, as `reference.random_layer` makes them; MXFP4's scales
                may be packed (mxfp4.pack_scales)
    max_tokens  room in the workspace
    num_blocks  blocks of the cooperative grid
    checked     whether data races and undefined behaviour are looked for: several times slower
    biases      of a plan that has them, bf16 bits or f32
    expert_counts
                what launches add the routed pairs of each expert to: int32, or None
    """

    def __init__(
        self,
        plan: MegaMoePlan,
        layer: Layer,
        max_tokens: int,
        num_blocks: int = 4,
        checked: bool = False,
        biases: Biases | None = None,
        expert_counts: np.ndarray | None = None,
    ):
        self.plan, self.max_tokens, self.num_blocks = plan, max_tokens, num_blocks
        self.layer = Layer(
            *(None if part is None else np.ascontiguousarray(part) for part in layer)
        )
        self._scales = self.layer.w13_scale, self.layer.w2_scale
        if format_of(plan.format).is_mx and self.layer.w13_scale.dtype == np.uint8:
            order = "interleaved" if plan.interleaved else "gate_first"  # or up: two halves
            order = order if is_gated(plan.activation) else None
            self._scales = tuple(
                scale if scale.itemsize == 4 else pack_scales(scale, plan.format, gate_up)
                for scale, gate_up in zip(self._scales, (order, None), strict=True)
            )
        self.biases = biases and Biases(*map(np.ascontiguousarray, biases))
        self.expert_counts = expert_counts
        self.executable = executable(plan, checked)
        self.report = ""
        self.rings: np.ndarray | None = None
        self.status = np.zeros(16, np.uint32)
        control = plan.control(max_tokens)
        self._control = {r.name: np.zeros(r.num_bytes, np.uint8) for r in control.regions}

    def __call__(
        self, x, topk_ids, topk_weights, variant: Variant = DEFAULT, **options
    ) -> np.ndarray:
        """One launch: y as bf16 bits [num_tokens, hidden]. Arguments as in Call, options as in
        run_in_stream.
        """
        return self.run_in_stream([Call(x, topk_ids, topk_weights, variant=variant)], **options)[0]

    def run_in_stream(
        self,
        calls: Sequence[Call | tuple],
        *,
        seed: int = 0,
        expire: bool = False,
        hardware_sums: bool = False,
        timeout_s: float = 600.0,
    ) -> list[np.ndarray]:
        """Launches of one stream, each a programmatic dependent of the one before, in one
        workspace: y of every call. Scratch and y hold 0xFF before.

        hardware_sums: sums of matrix multiplies are cut off as an H200 does, else exact.

        Raises EmulationError; `report` has the report of the last launches that came to their end,
        and `rings` the stamps of a traced plan's last.
        """
        shared = self._shared_arrays()
        ranks, ys = [], []
        for call in calls:
            rank, y = self._rank(Call(*call), shared)
            ranks.append(rank)
            ys.append(y)
        self.report = launch(
            self.executable,
            self.plan,
            ranks,
            in_stream=True,
            seed=seed,
            expire=expire,
            hardware_sums=hardware_sums,
            timeout_s=timeout_s,
        )
        return ys

    def _shared_arrays(self) -> dict[str, Array]:
        """Weights and workspace: the same in all launches of a stream."""
        layer = self.layer._replace(w13_scale=self._scales[0], w2_scale=self._scales[1])
        arrays = {n: Array(part) for n, part in layer._asdict().items() if part is not None}
        if self.biases is not None:
            arrays |= {f"{name}_bias": Array(bias) for name, bias in self.biases._asdict().items()}
        if self.expert_counts is not None:
            arrays["expert_counts"] = Array(self.expert_counts, writable=True)
        arrays["status"] = Array(self.status, writable=True)
        for region in self.plan.scratch(self.max_tokens).regions:
            if region.name != "trace":
                data = np.full(region.num_bytes, 0xFF, np.uint8)
                arrays[region.name] = Array(data, writable=True)
        for name, data in self._control.items():
            arrays[name] = Array(data, writable=True)
        return arrays

    def _bias_scalars(self) -> dict[str, int]:
        if self.biases is None:
            return {}
        w13, w2 = self.biases
        strides = {"w13_bias_stride": w13[0].nbytes, "w2_bias_stride": w2[0].nbytes}
        return strides | {"bias_bytes": w13.itemsize}

    def _rank(self, call: Call, shared: dict[str, Array]) -> tuple[Rank, np.ndarray]:
        """A launch, and the y that it fills."""
        plan = self.plan
        x, x_scale = call.x if isinstance(call.x, tuple) else (call.x, None)
        num_tokens = x.shape[0]
        assert num_tokens <= self.max_tokens and x.shape[1] == plan.hidden
        y = np.full((num_tokens, plan.hidden), 0xFFFF, np.uint16)
        arrays = shared | {
            "x": Array(_span(x)),
            "topk_ids": Array(call.topk_ids),
            "topk_weights": Array(call.topk_weights),
            "y": Array(y, writable=True),
        }
        if x_scale is not None:
            arrays["x_scale"] = Array(_span(x_scale))
        if plan.trace:
            self.rings = np.zeros(plan.trace_rings(self.num_blocks).shape, np.uint32)
            arrays["trace"] = Array(self.rings, writable=True)
        token, group = 0, 0
        if x_scale is not None:
            token, group = token_strides(x_scale.shape, x_scale.strides, *x.shape)
        scalars = {
            "x_stride": x.strides[0] if num_tokens else 0,
            "x_scale_token_stride": token // 4,
            "x_scale_group_stride": group // 4,
            **self._scale_strides(),
            **self._bias_scalars(),
            "y_stride": plan.hidden,
            "num_tokens": num_tokens,
            "bank_words": plan.bank_words(self.max_tokens),
            "first_stride": stride(self.num_blocks),
            "row_capacity": plan.row_capacity(self.max_tokens),
            "x_is_bf16": x_scale is None,
            "ids_are_i64": call.topk_ids.dtype == np.int64,
            "weights_are_bf16": call.topk_weights.dtype == np.uint16,
            "timeout_us": _TIMEOUT_US,
            **call.variant.scalars(plan.format),
        }
        late = {n: _span(data) if n.startswith("x") else data for n, data in call.late.items()}
        return Rank(arrays, scalars, self._maps(), self.num_blocks, late), y

    def _scale_strides(self) -> dict[str, int]:
        plan, kind = self.plan, format_of(self.plan.format).scales
        scales = self.layer.w13_scale, self.layer.w2_scale
        strides = weight_strides(kind, *scales, plan.intermediate, plan.interleaved)
        return {name: stride // 4 for name, stride in strides.items()}

    def _maps(self) -> dict[str, TensorMap]:
        plan = self.plan
        size, bytes_of = format_of(plan.format).element_bytes, format_of(plan.format).weight_bytes
        half, hidden, experts = plan.intermediate, plan.hidden, plan.num_experts

        def row_map(name: str, columns: int, rows: int) -> TensorMap:
            width, box = bytes_of(columns), (plan.weight_k_bytes, plan.block_rows, 1)
            return TensorMap(name, (width, rows, experts), (width, width * rows), box)

        channel, up = (2, 1) if plan.interleaved else (1, half)  # rows from one to the next
        gated_map = TensorMap(
            "w13",
            (bytes_of(hidden), 8, 2, half // 8, experts),
            tuple(bytes_of(hidden) * rows for rows in (channel, up, 8 * channel, 2 * half)),
            (plan.weight_k_bytes, 8, 2, plan.block_rows // 16, 1),
        )
        maps = {
            "w13_map": gated_map if is_gated(plan.activation) else row_map("w13", hidden, half),
            "w2_map": row_map("w2", half, hidden),
        }
        if plan.split_tokens:
            rows = plan.row_capacity(self.max_tokens)
            channels = {"pool": hidden, "mid": plan.derived_constants["mid_stride"]}
            for name, width in ((name, size * n) for name, n in channels.items()):
                for end, rows_of_box in plan.token_boxes.items():
                    box = (plan.block_k_bytes, rows_of_box)
                    maps[f"{name}_{end}"] = TensorMap(name, (width, rows), (width,), box)
        return maps


def _span(array: np.ndarray) -> np.ndarray:
    """The memory from the first to the last element of a strided array, as bytes."""
    if array.size == 0:
        return np.zeros(0, np.uint8)
    num_bytes = array.itemsize + sum(
        (n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)
    )
    first = (
        array.reshape(-1)[:1] if array.flags.c_contiguous else array[(slice(0, 1),) * array.ndim]
    )
    return np.lib.stride_tricks.as_strided(first.view(np.uint8), (num_bytes,), (1,))
