"""Region lists: the one truth about a memory's layout, for the host and for the kernel.

Python computes offsets and totals from the list; the template prints the same list as a struct with
`static_assert`s on every offset, so the two sides cannot drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

CTYPE_BYTES = {"u8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "float4": 16}


class LayoutError(ValueError):
    """A region list that cannot be laid out."""


@dataclass(frozen=True)
class Region:
    """`shape` elements of `ctype`, starting at a multiple of `align` bytes; `note` goes to the
    printed table. `is_zeroed` says that it must be zero before its first use.
    """

    name: str
    ctype: str
    shape: tuple[int, ...]
    align: int = 16
    note: str = ""
    is_zeroed: bool = False

    @property
    def num_bytes(self) -> int:
        return CTYPE_BYTES[self.ctype] * prod(self.shape)


@dataclass(frozen=True)
class MemoryMap:
    """Regions in order, without overlap.

    >>> MemoryMap((Region("a", "u8", (3,), 1), Region("b", "u32", (2,), 16))).offsets
    {'a': 0, 'b': 16}
    """

    regions: tuple[Region, ...]

    def __post_init__(self):
        names = [region.name for region in self.regions]
        if len(set(names)) != len(names):
            raise LayoutError(f"region names must be unique, got {names}")
        for region in self.regions:
            if region.ctype not in CTYPE_BYTES:
                raise LayoutError(
                    f"{region.name}: ctype must be one of {sorted(CTYPE_BYTES)}, "
                    f"got {region.ctype!r}"
                )
            if region.align & (region.align - 1) or region.align < CTYPE_BYTES[region.ctype]:
                raise LayoutError(
                    f"{region.name}: align must be a power of two and at least the element's size, "
                    f"got {region.align}"
                )

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of every region."""
        offsets, end = {}, 0
        for region in self.regions:
            offsets[region.name] = start = align(end, region.align)
            end = start + region.num_bytes
        return offsets

    @cached_property
    def zeroed(self) -> tuple[tuple[int, int], ...]:
        """Offset and bytes of every region that must be zero before its first use."""
        found = (r for r in self.regions if r.is_zeroed)
        return tuple((self.offsets[region.name], region.num_bytes) for region in found)

    @cached_property
    def align(self) -> int:
        return max((region.align for region in self.regions), default=1)

    @cached_property
    def num_bytes(self) -> int:
        """Total size, a multiple of the largest alignment (the `sizeof` of the printed struct)."""
        if not self.regions:
            return 0
        last = self.regions[-1]
        return align(self.offsets[last.name] + last.num_bytes, self.align)


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, to: int) -> int:
    return ceil_div(x, to) * to
