"""Biases for the oracle, random ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jitmoe.fp8 import round_bf16


class Biases(NamedTuple):
    """Of w13's rows [num_experts, 2*intermediate], or without a gate [num_experts, intermediate],
    and of w2's [num_experts, hidden].
    """

    w13: Any
    w2: Any

    @property
    def arguments(self) -> dict:
        """Of `reference.mega_moe` and `ExpertWeights`."""
        return {"w13_bias": self.w13, "w2_bias": self.w2}


def random_biases(
    num_experts: int, hidden: int, intermediate: int, seed: int, xp=np, gated: bool = True
) -> Biases:
    """From N(0, 1), as f32 of bf16 values: as large as gate and up of random tokens."""
    rng = xp.random.default_rng(seed)
    return Biases(
        *(
            round_bf16(rng.standard_normal((num_experts, rows), dtype=xp.float32), xp)
            for rows in (intermediate * (2 if gated else 1), hidden)
        )
    )
