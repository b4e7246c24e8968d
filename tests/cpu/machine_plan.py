"""Kernels of a few lines on the emulated machine, for tests of the machine itself."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jitmoe.emulate.compile import build
from jitmoe.emulate.run import Array, Rank, TensorMap, launch
from jitmoe.jit import render
from jitmoe.plan.memory_map import MemoryMap, Region
from jitmoe.plan.plan import Param, Plan, Role

ROOM = """\
{% import "macros.jinja" as macros with context %}
{{ paste("device/types.cuh") }}
{{ macros.constants(plan) }}
{{ macros.structs(plan) }}
{{ paste("device/memory.cuh") }}
{{ paste("device/matrix.cuh") }}
{{ paste("device/events.cuh") }}
{{ paste("device/no_stamps.cuh") }}
{{ paste("device/check.cuh") }}
{{ paste("device/mbarrier.cuh") }}
{{ paste("device/tma.cuh") }}
{{ paste("device/barriers.cuh") }}
{{ paste("device/wgmma.cuh.jinja") }}
{{ paste("device/wgmma_registers.cuh.jinja") }}
{{ paste("device/cluster.cuh") }}
{{ paste("device/launches.cuh") }}
DEVICE void wait(u64* barrier, u32 parity) {
    while (!try_wait(barrier, parity)) {
    }
}
DEVICE void init_barriers(Smem& smem, u32 arrivals) {
    if (thread_idx() == 0) {
        for (u32 i = 0; i < 4; ++i) init_barrier(&smem.barriers[i], arrivals);
        fence_barrier_init();
    }
    sync_block();
}
DEVICE void role_work(const Params& p, Smem& smem) {
BODY
}
extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    {{ plan.name }}(const __grid_constant__ Params p) {
    role_work(p, shared_memory<Smem>());
}
"""


@dataclass(frozen=True)
class MachinePlan(Plan):
    """One warpgroup, two tiles of 64 rows of 128 bytes, a few words and barriers. What is
    multiplied from registers is e4m3 if it quantises, else bf16.
    """

    trace: bool = False
    quantizes: bool = True

    name = "machine"

    @property
    def roles(self):
        return (Role("work", 4, 128, "what the test says"),)

    @cached_property
    def smem(self):
        return MemoryMap(
            (
                Region("tiles", "u8", (2, 8192), 1024),
                Region("words", "u32", (256,), 16),
                Region("barriers", "u64", (4,), 8),
            )
        )

    @property
    def params(self):
        return (
            Param("map", "TensorMap", "of data, boxes of 64 rows"),
            Param("narrow_map", "TensorMap", "the same, of 64 bytes a row"),
            Param("data", "u8*", "[128, 256]"),
            Param("words", "u32*", "[256]"),
            Param("peers", "u32* const*", "words of every rank"),
            Param("rank", "u32"),
            Param("launch", "u32"),
            Param("header", "u32*"),
            Param("status", "u32*"),
            Param("timeout_us", "u32"),
        )


PLAN = MachinePlan("sm_90a")


def render_kernel(
    directory: Path, body: str, layer: str = "emulated", plan: MachinePlan = PLAN
) -> str:
    """The text of a kernel whose threads all run `body`."""
    templates = directory / "templates"
    if not templates.exists():
        shutil.copytree(render.templates_dir(), templates)
    (templates / "machine.cu.jinja").write_text(ROOM.replace("BODY", body))
    return render.render(plan, layer, templates)


def random_data(rank: int) -> np.ndarray:
    """Of a rank before a launch."""
    return np.random.default_rng(rank).integers(0, 120, (128, 256)).astype(np.uint8)


def make_ranks(
    num_ranks: int = 1,
    num_blocks: int = 1,
    in_stream: bool = False,
    late: Mapping[int, Mapping[str, np.ndarray]] = MappingProxyType({}),
) -> list[Rank]:
    """A launch of every rank; in a stream the ranks are launches that share `words`, and `late` has
    late contents by launch: late data are an input.
    """
    ranks = []
    for rank in range(num_ranks):
        words = Array(np.zeros(256, np.uint32), writable=True)
        if in_stream and rank > 0:
            words = ranks[0].arrays["words"]
        late_contents = late.get(rank, {})
        peers = {8 * peer: (peer, "words") for peer in range(num_ranks)}
        arrays = {
            "data": Array(random_data(rank), writable="data" not in late_contents),
            "words": words,
            "peers": Array(np.zeros(num_ranks, np.uint64), writable=True, addresses=peers),
            "header": Array(np.zeros(64, np.uint32), writable=True),
            "status": Array(np.zeros(16, np.uint32), writable=True),
        }
        maps = {
            name: TensorMap("data", (256, 128), (256,), (width, 64))
            for name, width in (("map", 128), ("narrow_map", 64))
        }
        scalars = {"rank": rank, "timeout_us": 1_000_000}
        ranks.append(Rank(arrays, scalars, maps, num_blocks, late_contents))
    return ranks


def launches_of(ranks: list[Rank], num_launches: int) -> list[Rank]:
    """So many launches of every rank in the memory that it has, each rank's in its stream."""
    return [
        replace(rank, scalars=rank.scalars | {"launch": number}, stream=stream)
        for number in range(num_launches)
        for stream, rank in enumerate(ranks)
    ]


def run(
    directory: Path,
    body: str,
    *,
    num_ranks: int = 1,
    num_blocks: int = 1,
    seed: int = 0,
    checked: bool = True,
    in_stream: bool = False,
    late: Mapping[int, Mapping[str, np.ndarray]] = MappingProxyType({}),
    plan: MachinePlan = PLAN,
    **options,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(data, words) of every rank after a launch: see make_ranks; `options` go to `launch`. Raises
    EmulationError.
    """
    executable = build(render_kernel(directory, body, plan=plan), plan.name, checked)
    ranks = make_ranks(num_ranks, num_blocks, in_stream, late)
    launch(executable, plan, ranks, in_stream=in_stream, seed=seed, timeout_s=60, **options)
    return [(rank.arrays["data"].data, rank.arrays["words"].data) for rank in ranks]
