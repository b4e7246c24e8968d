"""Number formats of weights and activations that there are kernels for."""

from __future__ import annotations

from dataclasses import dataclass

# 128 x 128 weights, an output channel, or an expert's w13 (or each of gate and up) and w2.
SCALES = ("block", "channel", "tensor")


@dataclass(frozen=True)
class Format:
    """Sizes of a number format; a plan and a problem name it by its key in FORMATS.

    element_bytes  of a weight, and of an activation as the tensor cores take it
    hidden_step    hidden must be a multiple of it
    scales         what has a scale of its own in the weights: one of SCALES, or nothing
    """

    element_bytes: int
    hidden_step: int
    scales: str | None

    @property
    def quantizes(self) -> bool:
        """Whether activations are rounded to codes with scales of groups of channels."""
        return self.scales is not None

    @property
    def has_channel_scales(self) -> bool:
        """Whether an output channel has one scale, of its own or shared: no k-block has another."""
        return self.scales in ("channel", "tensor")


FORMATS = {
    **{f"fp8_{s}": Format(element_bytes=1, hidden_step=128, scales=s) for s in SCALES},
    "bf16": Format(element_bytes=2, hidden_step=16, scales=None),
}


def format_of(name: str) -> Format:
    """The format called `name`. Raises ValueError for an unknown name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"format must be one of {', '.join(FORMATS)}, got {name!r}; take that of the weights"
        )
    return FORMATS[name]
