"""Kernels of a few lines on a rail of the emulated machine: every rank is a node of its own."""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jitmoe.emulate.compile import build
from jitmoe.emulate.run import Array, Rank, launch
from jitmoe.jit import render
from jitmoe.plan.memory_map import MemoryMap, Region
from jitmoe.plan.plan import Param, Plan, Role

ROOM = """\
{% import "macros.jinja" as macros with context %}
{{ paste("device/types.cuh") }}
{{ macros.constants(plan) }}
{{ macros.structs(plan) }}
{% for name in ["memory", "events", "no_stamps", "check", "barriers", "launches", "signals"] %}
{{ paste("device/" ~ name ~ ".cuh") }}
{% endfor %}
{{ paste("device/rail_" ~ plan.rail ~ ".cuh") }}
template <typename T>
DEVICE T* own(const Params& p, u32 at) {
    return reinterpret_cast<T*>(p.peers[p.rank] + at);
}
DEVICE void await(const Params& p, u32 at, u64 value) {
    while (load_acquire_sys(own<u64>(p, at)) < value) {
    }
}
DEVICE void role_work(const Params& p) {
{{ "begin_rail();" if plan.rail == "delayed" }}
BODY
}
extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    {{ plan.name }}(const __grid_constant__ Params p) {
    role_work(p);
}
"""
NUM_BYTES = 16384  # of symmetric memory


@dataclass(frozen=True)
class RailPlan(Plan):
    """Two warps a block, and a rail."""

    rail: str = "memory"
    num_nodes: int = 2
    trace: bool = False

    name = "railway"

    @property
    def roles(self):
        return (Role("work", 2, 128, "what the test says"),)

    @cached_property
    def smem(self):
        words = Region("words", "u32", (64,), 16)
        queue = Region("rail_queue", "u32", (2, 9, 4), 16)
        return MemoryMap((words, queue) if self.rail == "delayed" else (words,))

    @property
    def params(self):
        return (
            Param("peers", "u8* const*", "symmetric memory by rank"),
            Param("rail_peers", "u8* const*", "the same by node"),
            Param("rank", "u32"),
            Param("launch", "u32"),
            Param("result", "u32*", "[1024]"),
            Param("header", "u32*"),
            Param("status", "u32*"),
            Param("timeout_us", "u32"),
        )

    @property
    def derived_constants(self):
        return {"node_ranks": 1}


def render_kernel(directory: Path, body: str, plan: RailPlan, layer: str = "emulated") -> str:
    """The text of a kernel whose threads all run `body`."""
    templates = directory / "templates"
    if not templates.exists():
        shutil.copytree(render.templates_dir(), templates)
    (templates / f"{plan.name}.cu.jinja").write_text(ROOM.replace("BODY", body))
    return render.render(plan, layer, templates)


def run(
    directory: Path,
    body: str,
    rail: str,
    *,
    num_ranks: int = 2,
    num_launches: int = 1,
    num_blocks: int = 1,
    checked: bool = True,
    **options,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(symmetric memory as u32, result) of every rank after its launches; `options` go to `launch`.
    Raises EmulationError.
    """
    plan = RailPlan("sm_90a", rail, num_ranks)
    executable = build(render_kernel(directory, body, plan), plan.name, checked)
    tables = {8 * peer: (peer, "symmetric") for peer in range(num_ranks)}
    arrays = []
    for rank in range(num_ranks):
        others = {at: place for at, place in tables.items() if place[0] != rank}
        arrays.append(
            {
                "symmetric": Array(np.zeros(NUM_BYTES // 4, np.uint32), writable=True),
                "result": Array(np.zeros(1024, np.uint32), writable=True),
                "peers": Array(
                    np.zeros(num_ranks, np.uint64), True, {8 * rank: (rank, "symmetric")}
                ),
                "rail_peers": Array(np.zeros(num_ranks, np.uint64), True, others),
                "header": Array(np.zeros(64, np.uint32), writable=True),
                "status": Array(np.zeros(16, np.uint32), writable=True),
            }
        )
    launches = [
        Rank(
            arrays[rank],
            {"rank": rank, "launch": number, "timeout_us": 1_000_000},
            num_blocks=num_blocks,
            stream=rank,
        )
        for number in range(num_launches)
        for rank in range(num_ranks)
    ]
    launch(executable, plan, launches, in_stream=True, timeout_s=60, **options)
    return [(of["symmetric"].data, of["result"].data) for of in arrays]
