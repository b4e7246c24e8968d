"""The parameter struct: one list, and the same offsets in NumPy and in C."""

import ctypes
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from jitmoe.jit import nvrtc, params
from jitmoe.plan.plan import Param
from jitmoe.run.launch import ParamBlock

PARAMS = (
    Param("map", "TensorMap", "a map"),
    Param("x", "const u8*"),
    Param("flag", "u32"),
    Param("y", "float*"),
    Param("scale", "f32"),
    Param("shift", "i32"),
    Param("other_map", "TensorMap"),
    Param("offset", "i64"),
    Param("bits", "u64"),
    Param("last", "u32"),
)
CTYPES = {"i64": ctypes.c_int64, "u64": ctypes.c_uint64, "u32": ctypes.c_uint32}
CTYPES |= {"i32": ctypes.c_int32, "f32": ctypes.c_float}


def test_offsets_are_those_of_a_c_compiler():
    """ctypes lays scalars and pointers out by the platform's rules."""
    scalars = [param for param in PARAMS if param.ctype != "TensorMap"]
    struct = type(
        "S",
        (ctypes.Structure,),
        {"_fields_": [(p.name, CTYPES.get(p.ctype, ctypes.c_void_p)) for p in scalars]},
    )
    layout = params.layout(scalars)
    assert {f.name: f.offset for f in layout.fields} == {
        p.name: getattr(struct, p.name).offset for p in scalars
    }
    assert layout.num_bytes == 64


def test_tensor_maps_are_aligned_and_the_size_is_padded():
    layout = params.layout(PARAMS)
    offsets = {field.name: field.offset for field in layout.fields}
    assert offsets["map"] == 0
    assert offsets["x"] == 128
    assert offsets["other_map"] == 192
    assert offsets["offset"] == 320
    assert layout.num_bytes == 384
    assert layout.dtype.itemsize == 384


def contents(block: ParamBlock, num_bytes: int) -> bytes:
    """What the driver reads through the block's array of one pointer."""
    return ctypes.string_at(ctypes.c_void_p.from_address(block.pointers).value, num_bytes)


def test_copies_of_a_block_are_apart():
    fields = (PARAMS[0], PARAMS[1], PARAMS[3], PARAMS[7])
    block = ParamBlock(SimpleNamespace(params=fields))
    block.write_maps(bytes(range(128)))
    block.write(1, 2, -3)
    twin = block.copy()
    twin.address_writer(2)(1 << 40, 1 << 41)
    assert contents(block, 152) == bytes(range(128)) + struct.pack("QQq", 1, 2, -3)
    assert contents(twin, 152) == bytes(range(128)) + struct.pack("QQq", 1 << 40, 1 << 41, -3)


def test_dtype_writes_where_the_struct_reads():
    layout = params.layout(PARAMS)
    record = np.zeros(1, layout.dtype)
    record["map"] = np.frombuffer(bytes(range(128)), "V128")[0]
    record["y"], record["shift"], record["scale"] = 0x1122334455667788, -2, 1.5
    data = record.tobytes()
    at = {field.name: field.offset for field in layout.fields}
    assert data[:128] == bytes(range(128))
    assert int.from_bytes(data[at["y"] : at["y"] + 8], "little") == 0x1122334455667788
    assert int.from_bytes(data[at["shift"] : at["shift"] + 4], "little", signed=True) == -2
    assert np.frombuffer(data, "<f4", 1, at["scale"])[0] == 1.5


def c_source(layout: params.Layout) -> str:
    """The struct and its asserts, written without the templates."""
    lines = [f"{field.ctype} {field.name};" for field in layout.fields]
    checks = [
        f"static_assert(__INTADDR__(&((S*)0)->{f.name}) == {f.offset});" for f in layout.fields
    ]
    return "\n".join(
        [
            "using u8 = unsigned char; using u32 = unsigned; using i32 = int;",
            "using u64 = unsigned long long; using i64 = long long;",
            "struct alignas(64) TensorMap { u8 opaque[128]; };",
            "struct alignas(64) S {",
            *lines,
            "};",
            f"static_assert(sizeof(S) == {layout.num_bytes});",
            *checks,
            'extern "C" __global__ void f(const __grid_constant__ S s) {}',
        ]
    )


@pytest.mark.parametrize("chosen", [PARAMS, PARAMS[1:6], PARAMS[::-1], ()], ids=len)
def test_device_compiler_agrees(chosen):
    nvrtc.compile(c_source(params.layout(chosen)), "sm_90a", "params.cu")


def test_a_wrong_offset_would_be_noticed():
    text = c_source(params.layout(PARAMS)).replace("== 320", "== 328")
    with pytest.raises(nvrtc.CompileError, match="static assertion failed"):
        nvrtc.compile(text, "sm_90a", "params.cu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([Param("a", "u32"), Param("a", "u64")], "unique"),
        ([Param("a", "half")], "parameter a: ctype must be a pointer or one of TensorMap"),
    ],
)
def test_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        params.layout(wrong)
