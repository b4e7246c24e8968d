"""A kernel of a few lines that uses the rail by GIN, for tests of what is linked."""

from dataclasses import dataclass
from pathlib import Path

from jitmoe.jit import render
from jitmoe.plan.memory_map import MemoryMap, Region
from jitmoe.plan.plan import Param, Plan, Role

ROOM = """\
{% import "macros.jinja" as macros with context %}
{{ paste("device/types.cuh") }}
{{ macros.constants(plan) }}
{{ macros.structs(plan) }}
{% for name in ["memory", "events", "no_stamps", "check", "barriers", "rail_gin"] %}
{{ paste("device/" ~ name ~ ".cuh") }}
{% endfor %}
extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    {{ plan.name }}(const __grid_constant__ Params p) {
    BODY
}
"""
BODY = """\
for (u32 node = 0; node < kNumNodes; ++node) {
        if (node == p.rank / kNodeRanks) continue;
        put(p, node, p.to, p.from, p.bytes);
        signal_add(p, node, p.at, 1);
    }
    flush(p);
"""


@dataclass(frozen=True)
class RailPlan(Plan):
    """Puts to all other nodes, tells them and waits until the source is free."""

    num_nodes: int = 2
    node_ranks: int = 8

    name = "rail_test"
    libraries = ("nccl_device",)

    derived_constants = {"trace": 0}

    @property
    def roles(self):
        return (Role("send", 4, 128, "put, signal, flush"),)

    @property
    def smem(self):
        return MemoryMap((Region("unused", "u32", (4,), 16),))

    @property
    def params(self):
        return (
            Param("rail_comm", "const u8*"),
            Param("rail_window", "u8*"),
            Param("rail_offset", "i64"),
            Param("to", "i64"),
            Param("from", "i64"),
            Param("at", "i64"),
            Param("header", "u32*"),
            Param("status", "u32*"),
            Param("rank", "u32"),
            Param("bytes", "u32"),
            Param("timeout_us", "u32"),
        )


def make_templates(directory: Path, body: str = BODY) -> Path:
    """The project's templates, and a room for RailPlan."""
    directory.mkdir()
    source = render.templates_dir()
    for path in source.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "rail_test.cu.jinja").write_text(ROOM.replace("BODY", body))
    return directory
