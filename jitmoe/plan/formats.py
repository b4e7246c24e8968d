"""Number formats of weights and activations that there are kernels for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """Sizes of a number format; a plan and a problem name it by its key in FORMATS.

    element_bytes  of a weight, and of an activation as the tensor cores take it
    hidden_step    hidden must be a multiple of it
    quantizes      whether activations are rounded to codes with scales of groups of channels
    """

    element_bytes: int
    hidden_step: int
    quantizes: bool


FORMATS = {
    "fp8_block": Format(element_bytes=1, hidden_step=128, quantizes=True),
    "bf16": Format(element_bytes=2, hidden_step=16, quantizes=False),
}


def format_of(name: str) -> Format:
    """The format called `name`. Raises ValueError for an unknown name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"format must be one of {', '.join(FORMATS)}, got {name!r}; take that of the weights"
        )
    return FORMATS[name]
