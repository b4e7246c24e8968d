"""A kernel family of a few lines for the tests of jit/, and a compiler that is quick and counts."""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jitmoe.jit import nvrtc, render
from jitmoe.plan.memory_map import MemoryMap, Region
from jitmoe.plan.plan import Param, Plan, Role

ROOM = """\
{% import "macros.jinja" as macros with context %}
{{ macros.tables(plan) }}
{{ paste("device/types.cuh") }}
{{ macros.constants(plan) }}
{{ macros.structs(plan) }}
template <u32 kRegs>
DEVICE void set_registers() {}
DEVICE void role_copy(const Params& p, Smem& smem) { smem.rows[0][lane_idx()] = p.x[lane_idx()]; }
DEVICE void role_pause(const Params&, Smem&) {}
DEVICE void role_add(const Params& p, Smem& smem) { p.y[lane_idx()] = p.factor * smem.rows[0][0]; }
extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    {{ plan.name }}(const __grid_constant__ Params p) {
    Smem& smem = shared_memory<Smem>();
    const u32 warp = warp_idx();
{{ macros.role_switch(plan, "p, smem") }}
}
"""


@dataclass(frozen=True)
class TinyPlan(Plan):
    """Adds; `num_rows` makes plans differ."""

    num_rows: int = 2
    bias: int = -3
    big: int = 5_000_000_000

    name = "tiny"

    @property
    def roles(self):
        return (
            Role("copy", 1, 40, "read a row"),
            Role("pause", 3, 40, "nothing"),
            Role("add", 4, 96, "write the row back"),
        )

    @cached_property
    def smem(self):
        return MemoryMap(
            (
                Region("rows", "f32", (self.num_rows, 256), 1024, "copy -> add"),
                Region("full", "u64", (self.num_rows,), 8, "copy -> add"),
                Region("flag", "u8", (3,), 1),
                Region("counts", "u16", (5,), 4),
                Region("vector", "float4", (1,), 16),
            )
        )

    @property
    def params(self):
        return (
            Param("map", "TensorMap", "unused"),
            Param("x", "const float*", "[256]"),
            Param("count", "u32"),
            Param("y", "float*", "[256]"),
            Param("factor", "f32"),
            Param("stride", "i64"),
            Param("last", "i32"),
        )


def make_templates(directory: Path, room: str = ROOM) -> Path:
    """A copy of the project's templates with a room for TinyPlan."""
    shutil.copytree(render.templates_dir(), directory)
    (directory / "tiny.cu.jinja").write_text(room)
    return directory


def fake_cubin(text: str) -> nvrtc.Cubin:
    log = "ptxas info    : Used 40 registers, used 1 barriers\n"
    return nvrtc.Cubin(b"\x7fELF" + text.encode()[:64], log, nvrtc.parse_log(log), 0.25)
