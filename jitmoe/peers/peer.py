"""Peer: how an implementation of the layer is judged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A peer's name; whether its recipe is block FP8, as ours; the largest right relative error;
    the formats of weights that it can be given.
    """

    name: str
    is_block_fp8: bool
    max_error: float
    formats: tuple[str, ...] = ("fp8_block",)
