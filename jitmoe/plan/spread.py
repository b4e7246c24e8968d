"""An order of blocks in which any few that are next to each other lie far apart."""

from __future__ import annotations

from functools import cache
from math import gcd

GOLDEN = 0.6180339887498949


@cache
def stride(num_blocks: int) -> int:
    """A number coprime to `num_blocks`: block b comes b * stride % num_blocks-th, and the first n
    are spread evenly for every n.

    That takes small partial quotients of num_blocks / stride as a continued fraction (Knuth, The
    Art of Computer Programming 2, section 3.3.3, and 3, section 6.4); the golden section has none
    but 1.
    """
    coprime = [s for s in range(1, num_blocks + 1) if gcd(s, num_blocks) == 1]
    return min(
        coprime, key=lambda s: (_largest_quotient(num_blocks, s), abs(s - num_blocks * GOLDEN))
    )


def _largest_quotient(a: int, b: int) -> int:
    largest = 0
    while b:
        largest = max(largest, a // b)
        a, b = b, a % b
    return largest
