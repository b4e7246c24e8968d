"""An order of blocks in which any few that are next to each other lie far apart."""

from __future__ import annotations

from math import gcd

GOLDEN = 0.6180339887498949


def stride(num_blocks: int) -> int:
    """A number coprime to `num_blocks`, near the golden section of it.

    Block b comes b * stride % num_blocks-th: the first n are spread evenly for every n (Knuth, The
    Art of Computer Programming 3, section 6.4, Fibonacci hashing).
    """
    near = round(num_blocks * GOLDEN)
    candidates = sorted(range(1, num_blocks + 1), key=lambda s: (abs(s - near), s))
    return next(s for s in candidates if gcd(s, num_blocks) == 1)
