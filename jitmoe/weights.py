"""ExpertWeights: checkpoint tensors as the kernel takes them, none copied but scales in e8m0."""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np

from jitmoe.plan.formats import FORMATS, SCALES, format_of
from jitmoe.plan.problem import MX_GROUP, MoeProblem
from jitmoe.plan.scales import check_scales, kind_of, weight_strides
from jitmoe.plan.variant import check_gate_up, check_no_gate
from jitmoe.run.arrays import HOST, check_array, check_dense, check_rows, host_view, view
from jitmoe.weight_scales import read_mx_scale, read_scale

# What w13 and w2 may be, with scales and without.
_FP8, _BF16 = ("e4m3", "u8"), ("bf16", "u16")


def _is_mx(format: str | None, scales: str | None) -> bool:
    """Whether MXFP4 is asked for. Raises ValueError for another format, or for MXFP4's scales."""
    if format is None:
        return False
    allowed = [name for name, one in FORMATS.items() if one.is_mx]
    if format not in allowed:
        raise ValueError(
            f"format must be {' or '.join(allowed)}, got {format!r}; leave it out for others, "
            "which are found by dtype and scales"
        )
    if scales is not None:
        raise ValueError(f"scales must be None for {format}, got {scales!r}; leave it out")
    return True


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
    """Views of the experts' weights, FP8, bf16 or MXFP4, validated once.

    w13        [num_experts, 2 * intermediate, hidden] e4m3 or bf16 (or uint8 or uint16 of the same
               bits): gate rows first, then up, or as gate_up says; of experts without a gate
               [num_experts, intermediate, hidden], and below `intermediate` instead of twice it
    w2         [num_experts, hidden, intermediate] of the same dtype
               MXFP4: uint8 of half as many columns, two e2m1 codes each, the first in the low half
               (gpt-oss's blocks with their last two dimensions as one)
    w13_scale  None for bf16; for MXFP4 e8m0 (or uint8 of the same bits), for each 32 along a row,
               [num_experts, 2 * intermediate, hidden / 32]; for FP8 f32, value = code * scale: for
               each block of 128 x 128 weights,
               [num_experts, ceil(2 * intermediate / 128), hidden / 128]; for each output channel,
               [num_experts, 2 * intermediate] or with a trailing 1; for each expert,
               [num_experts] or with trailing ones; or for gate and up, in the order of w13's rows,
               [num_experts, 2] or with a trailing 1
    w2_scale   of the same kind: [num_experts, hidden / 128, ceil(intermediate / 128)];
               [num_experts, hidden]; or [num_experts], the latter two also with trailing ones; of
               MXFP4 [num_experts, hidden, intermediate / 32]
    w13_bias   [num_experts, 2 * intermediate] bf16 (or uint16 of the same bits) or f32: added to
               gate and up, in the order of w13's rows
    w2_bias    [num_experts, hidden] of the same dtype: added to what an expert gives. Both or none:
               zeros stand for one that is missing
    gate_up    "gate_first", "up_first" or "interleaved" (gate, up, gate, up, ...): the order of
               rows in w13, w13_bias and w13_scale, whose blocks are of 128 rows as they lie; the
               default without a gate
    scales     "block", "channel" or "tensor": the kind of both (default: by their shapes, "block"
               where those of a tiny layer fit two)
    format     "mxfp4_fp8" or "mxfp4_bf16" for MXFP4, whose tokens are multiplied in e4m3 or in
               bf16; others are found by dtype and scales. In mxfp4_fp8, weights of a scale that is
               2^-12 of the largest of their row or less are off by up to 6 * 2^-12 of that

    Scales of FP8 may be in e8m0 too. Those in e8m0 are copied here, in f32 or for MXFP4 in an order
    of the kernel's own, which waits for the GPU, and later writes to them are not seen; MXFP4's may
    have been brought into it by `jitmoe.quantize.pack_scales` before. All else is used in place.

    CuPy arrays, PyTorch tensors or anything that speaks `__cuda_array_interface__` or DLPack. Rows
    must be dense and start at multiples of 16 bytes; rows and experts may be strided. NumPy arrays
    are weights for `mega_moe(..., backend="emulated")`, which a GPU refuses. Raises TypeError for
    another host array or a mixture and ValueError, one sentence, for shapes, dtypes, strides or
    devices that do not fit.

    `format` is one of jitmoe.plan.formats.FORMATS; `gated` whether w13 has more rows than w2 has
    channels.
    """

    def __init__(
        self,
        w13,
        w2,
        w13_scale=None,
        w2_scale=None,
        *,
        w13_bias=None,
        w2_bias=None,
        gate_up: str = "gate_first",
        scales: str | None = None,
        format: str | None = None,
    ):
        check_gate_up(gate_up)
        check_scales("block" if scales is None else scales)
        self.gate_up = gate_up
        read = host_view if isinstance(w13, np.ndarray) else view
        self.w13, self.w2 = read(w13, "w13"), read(w2, "w2")
        if _is_mx(format, scales):
            self.format = format
            self.w13_scale, self.w2_scale = (
                None if s is None else read(s, f"{name}_scale")
                for s, name in ((w13_scale, "w13"), (w2_scale, "w2"))
            )
            self._check_both_scales()
        else:
            w13_scale, self.w13_scale = read_scale(w13_scale, "w13_scale", read)
            w2_scale, self.w2_scale = read_scale(w2_scale, "w2_scale", read)
            self.format = self._find_format(scales)
        self.tensors = (w13, w2, w13_scale, w2_scale)  # they keep the memory alive
        form = format_of(self.format)
        packed = 2 if form.is_mx else 1
        self.gated = self.w13.shape[1:2] != tuple(packed * n for n in self.w2.shape[2:])
        if len(self.w13.shape) != 3 or (self.gated and self.w13.shape[1] % 2):
            raise ValueError(
                "w13 must have shape [num_experts, 2 * intermediate, hidden], "
                f"got {list(self.w13.shape)}; stack the gate rows of each expert on its up rows"
            )
        if not self.gated:
            check_no_gate(gate_up)
        self.num_experts, rows, columns = self.w13.shape
        self.hidden = packed * columns
        self.intermediate = rows // 2 if self.gated else rows
        self.device = self.w13.device
        self.problem(0, 1)  # refuses sizes there is no kernel for
        e, h, i = self.num_experts, self.hidden, self.intermediate
        dtypes = {4: ("u8",), 8: _FP8, 16: _BF16}[form.weight_bits]
        wide = 1 if form.weight_bits == 16 else 8 // form.weight_bits  # weights of an element
        for name, shape in (("w13", (e, rows, h // wide)), ("w2", (e, h, i // wide))):
            remedy = "w13 and w2 must be of the same layer: transpose or slice one of them"
            check_array(getattr(self, name), name, shape, dtypes, self.device, remedy)
            check_rows(getattr(self, name), name, 8 if form.weight_bits == 16 else 16)
        if form.is_mx:
            self._pack_scales(read)
        elif self.format != "bf16":
            self.format = f"fp8_{self._find_kind_of_scales(scales)}"
        self.bias_tensors = (w13_bias, w2_bias)
        self.has_bias = w13_bias is not None or w2_bias is not None
        if self.has_bias:
            self._read_biases(read)
        # What calls with these weights share (fused.py): plans, kernels and packed parameters; and
        # by their signatures, arguments that were found right.
        self.memo, self.calls = Memo(256), Memo(1024)

    def _find_format(self, kind: str | None) -> str:
        """By dtype, of whatever scales there are. Raises ValueError for what is no format."""
        scales = {"w13_scale": self.w13_scale, "w2_scale": self.w2_scale}
        given = [name for name, scale in scales.items() if scale is not None]
        if self.w13.dtype in _BF16:
            given += ["scales"] * (kind is not None)
            if given:
                raise ValueError(
                    f"w13 is {self.w13.dtype}, bf16 takes no scales, got {' and '.join(given)}; "
                    "leave them out"
                )
            return "bf16"
        if self.w13.dtype not in _FP8:
            raise ValueError(
                "w13 must have dtype e4m3 or u8 with scales, or bf16 or u16 without, got "
                f"{self.w13.dtype}; convert or view it"
            )
        self._check_both_scales()
        return "fp8_block"

    def _check_both_scales(self) -> None:
        scales = {"w13_scale": self.w13_scale, "w2_scale": self.w2_scale}
        given = [name for name, scale in scales.items() if scale is not None]
        if len(given) != len(scales):
            raise ValueError(
                f"w13 is {self.w13.dtype} and needs both scales, got "
                f"{' and '.join(given) or 'none'}; pass w13_scale and w2_scale"
            )

    def _pack_scales(self, read) -> None:
        """MXFP4's, in the order of the kernel."""
        sizes = {
            "w13_scale": (*self.w13.shape[:2], self.hidden // MX_GROUP),
            "w2_scale": (self.num_experts, self.hidden, self.intermediate // MX_GROUP),
        }
        scales = []
        for (name, shape), given in zip(sizes.items(), self.tensors[2:], strict=True):
            order = self.gate_up if name == "w13_scale" and self.gated else None
            place = read, self.device
            packed, seen = read_mx_scale(given, name, shape, *place, self.format, order)
            scales.append(packed)
            setattr(self, name, seen)
        self.tensors = (*self.tensors[:2], *scales)

    def _find_kind_of_scales(self, said: str | None) -> str:
        scales = {"w13_scale": self.w13_scale, "w2_scale": self.w2_scale}
        for name, scale in scales.items():
            check_array(scale, name, scale.shape, ("f32", "e8m0", "u8"), self.device, "")
        sizes = self.num_experts, self.hidden, self.intermediate
        kinds = SCALES if said is None else (said,)
        shapes = (scale.shape for scale in scales.values())
        kind = kind_of(*shapes, *sizes, kinds, self.gated)
        if kind == "block":
            for name, scale in scales.items():
                check_dense(scale, name)
        return kind

    def problem(self, num_tokens: int, top_k: int) -> MoeProblem:
        """A call's sizes. Raises ValueError for those there is no kernel for."""
        sizes = num_tokens, self.hidden, self.intermediate, self.num_experts, top_k
        return MoeProblem(*sizes, self.format, self.gated)

    def _read_biases(self, read) -> None:
        dtypes, biases = ("bf16", "u16", "f32"), []
        rows = {"w13_bias": self.w13.shape[1], "w2_bias": self.hidden}
        for (name, num_rows), tensor in zip(rows.items(), self.bias_tensors, strict=True):
            if tensor is None:
                raise ValueError(
                    f"{name} must be given where the other bias is, got None; pass zeros"
                )
            bias = read(tensor, name)
            remedy = "pass one number for each row of the expert's weights"
            check_array(bias, name, (self.num_experts, num_rows), dtypes, self.device, remedy)
            check_rows(bias, name, 4 if bias.dtype == "f32" else 8)
            biases.append(bias)
            dtypes = ("f32",) if bias.dtype == "f32" else ("bf16", "u16")  # of the other too
        self.w13_bias, self.w2_bias = biases

    @property
    def bias_fields(self) -> tuple[int, ...]:
        """Parameters of the kernel that tell where biases lie; none where there are none."""
        if not self.has_bias:
            return ()
        biases = self.w13_bias, self.w2_bias
        num_bytes = 4 if self.w13_bias.dtype == "f32" else 2
        strides = [num_bytes * bias.strides[0] for bias in biases]
        return (*[bias.ptr for bias in biases], *strides, num_bytes)

    @property
    def variant_fields(self) -> dict[str, str | bool]:
        """What a `Variant` takes from weights."""
        return {"gate_up": self.gate_up, "has_bias": self.has_bias}

    def __repr__(self):
        device = "host" if self.device == HOST else self.device
        order = "" if self.gate_up == "gate_first" else f", gate_up={self.gate_up!r}"
        kind = "" if self.format == "fp8_block" else f", format={self.format!r}"
        kind += ", no gate" * (not self.gated) + ", biases" * self.has_bias
        return (
            f"ExpertWeights(num_experts={self.num_experts}, hidden={self.hidden}, "
            f"intermediate={self.intermediate}, device={device}{kind}{order})"
        )

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of weights and scales."""
        elements = prod(self.w13.shape) + prod(self.w2.shape)  # of MXFP4 bytes, two weights each
        scales = sum(prod(s.shape) for s in (self.w13_scale, self.w2_scale) if s is not None)
        return elements * (2 if self.format == "bf16" else 1) + 4 * scales

    @cached_property
    def scale_addresses(self) -> tuple[int, int]:
        """Of w13_scale and w2_scale, 0 where there are none."""
        return tuple(0 if s is None else s.ptr for s in (self.w13_scale, self.w2_scale))

    @cached_property
    def scale_strides(self) -> tuple[int, ...]:
        """In elements: the values of `jitmoe.plan.scales.weight_strides`."""
        kind, interleaved = format_of(self.format).scales, self.gate_up == "interleaved"
        scales = self.w13_scale, self.w2_scale
        return tuple(weight_strides(kind, *scales, self.intermediate, interleaved).values())
