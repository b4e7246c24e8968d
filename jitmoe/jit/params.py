"""The kernel's parameter struct: one ordered field list gives the NumPy dtype and the C struct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jitmoe.plan.memory_map import align
from jitmoe.plan.plan import Param

STRUCT_ALIGN = 64  # of a tensor map, hence of the struct

# ctype -> (NumPy format, bytes, alignment, spelling in C)
_TYPES = {
    "TensorMap": ("V128", 128, 64, "TensorMap"),
    "u64": ("<u8", 8, 8, "u64"),
    "i64": ("<i8", 8, 8, "i64"),
    "u32": ("<u4", 4, 4, "u32"),
    "i32": ("<i4", 4, 4, "i32"),
    "f32": ("<f4", 4, 4, "float"),
}


@dataclass(frozen=True)
class Field:
    """A parameter with its place in the struct."""

    name: str
    ctype: str
    note: str
    offset: int
    num_bytes: int
    numpy_format: str


@dataclass(frozen=True)
class Layout:
    """The fields in order and the size of the struct, a multiple of 64."""

    fields: tuple[Field, ...]
    num_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """A record of this dtype is the struct, byte for byte; padding bytes belong to no field."""
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [field.numpy_format for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.num_bytes,
            }
        )


def layout(params: Sequence[Param]) -> Layout:
    """Lay `params` out as a C compiler does.

    Raises ValueError for a repeated name or an unknown ctype.
    """
    fields, end = [], 0
    for param in params:
        numpy_format, num_bytes, alignment, spelling = _type(param)
        start = align(end, alignment)
        fields.append(Field(param.name, spelling, param.note, start, num_bytes, numpy_format))
        end = start + num_bytes
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise ValueError(f"parameter names must be unique, got {names}")
    return Layout(tuple(fields), max(align(end, STRUCT_ALIGN), STRUCT_ALIGN))


def _type(param: Param):
    if param.ctype.endswith("*"):
        return "<u8", 8, 8, param.ctype
    if param.ctype in _TYPES:
        return _TYPES[param.ctype]
    allowed = ", ".join(_TYPES)
    raise ValueError(
        f"parameter {param.name}: ctype must be a pointer or one of {allowed}, got {param.ctype!r}"
    )
