"""Number formats of weights and activations that there are kernels for."""

from __future__ import annotations

from dataclasses import dataclass

# 128 x 128 weights, an output channel, or an expert's w13 (or each of gate and up) and w2.
SCALES = ("block", "channel", "tensor")


@dataclass(frozen=True)
class Format:
    """Sizes of a number format; a plan and a problem name it by its key in FORMATS.

    weight_bits        of a weight
    element_bytes      of an activation as the tensor cores take it
    hidden_step        hidden must be a multiple of it
    intermediate_step  so must intermediate
    scales             what has a scale of its own in the weights: one of SCALES, "mx" (32 of a row,
                       in e8m0), or nothing
    """

    weight_bits: int
    element_bytes: int
    hidden_step: int
    intermediate_step: int
    scales: str | None

    @property
    def quantizes(self) -> bool:
        """Whether activations are rounded to codes with scales of groups of channels."""
        return self.element_bytes == 1

    @property
    def is_mx(self) -> bool:
        """Whether weights are e2m1 codes with a scale for 32 of a row."""
        return self.scales == "mx"

    def weight_bytes(self, num: int) -> int:
        """Of that many weights in a row."""
        return num * self.weight_bits // 8

    @property
    def has_channel_scales(self) -> bool:
        """Whether an output channel has one scale, of its own or shared: no k-block has another."""
        return self.scales in ("channel", "tensor")


FORMATS = {
    **{f"fp8_{s}": Format(8, 1, 128, 16, s) for s in SCALES},
    "bf16": Format(16, 2, 16, 16, None),
    "mxfp4_fp8": Format(4, 1, 32, 32, "mx"),
    "mxfp4_bf16": Format(4, 2, 32, 32, "mx"),
}


def format_of(name: str) -> Format:
    """The format called `name`. Raises ValueError for an unknown name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"format must be one of {', '.join(FORMATS)}, got {name!r}; take that of the weights"
        )
    return FORMATS[name]
