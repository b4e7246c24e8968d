"""What all layers of a run share."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from types import ModuleType

from jitmoe.bench.ceilings import Ceilings
from jitmoe.bench.points import Points
from jitmoe.bench.rows import Point, Rates, rows_of
from jitmoe.bench.trial import Protocol, Result
from jitmoe.peers.peer import Peer
from jitmoe.plan.gpu import GpuSpec


@dataclass(frozen=True)
class Setting:
    """`deadline` is of time.monotonic(), ceilings are by heat."""

    points: Points
    protocol: Protocol
    gpu: GpuSpec
    peers: list[ModuleType]
    ceilings: dict[str, Ceilings]
    deadline: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def rows(self, point: Point, peer: Peer, result: Result) -> list[dict]:
        rates = Rates(self.gpu.read_gbps, self.gpu.tflops(point.layer.format))
        return rows_of(point, peer, result, rates, self.ceilings)


def free() -> None:
    """Give memory back that one library holds and another may want."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
