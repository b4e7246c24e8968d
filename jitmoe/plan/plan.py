"""Plans: every number a kernel needs and none it does not.

`Plan` is all that `jit/` and `run/launch.py` know of a kernel; each kernel has a subclass of its
own. Constraints are checked once, in `check()`, by the heuristic and by sweeps alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.memory_map import MemoryMap

WARP_THREADS = 32
WARPGROUP_WARPS = 4
REGISTER_FILE = 65_536  # 32-bit registers of one SM, handed to warps in multiples of 8 per thread


class PlanError(ValueError):
    """A plan that no kernel can be built or launched from."""


@dataclass(frozen=True)
class Role:
    """What a range of warps does.

    Ranges follow from the order of the roles and are never typed in.
    """

    name: str
    num_warps: int
    num_regs: int
    job: str


@dataclass(frozen=True)
class Param:
    """One field of the kernel's parameter struct; a `ctype` that ends in `*` is a device
    pointer.
    """

    name: str
    ctype: str
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """A kernel to be rendered, compiled and launched."""

    arch: str

    name = ""  # the `extern "C"` symbol, the room (`<name>.cu.jinja`) and the cache folder
    libraries = ()  # device libraries that the kernel calls, by their names in jit/link.py

    @property
    def roles(self) -> tuple[Role, ...]:
        raise NotImplementedError

    @property
    def smem(self) -> MemoryMap:
        raise NotImplementedError

    @property
    def params(self) -> tuple[Param, ...]:
        raise NotImplementedError

    @property
    def derived_constants(self) -> dict[str, int]:
        """Constants of the kernel that follow from the fields."""
        return {}

    @property
    def num_threads(self) -> int:
        return WARP_THREADS * sum(role.num_warps for role in self.roles)

    @property
    def constants(self) -> dict[str, int]:
        """Integer fields and derived constants, by Python name (`num_stages` is `kNumStages` in the
        kernel).

        Register counts are left out: they are printed with the roles.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.endswith("_regs")}
        own = {name: int(value) for name, value in own.items() if isinstance(value, int)}
        return own | {"num_threads": self.num_threads} | self.derived_constants

    def check(self, gpu: GpuSpec) -> None:
        """Raise PlanError with a sentence if the plan cannot run on `gpu`."""
        if gpu.arch != self.arch:
            raise PlanError(
                f"the plan is for {self.arch}, the {gpu.name} is {gpu.arch}; plan again for it"
            )
        check_roles(self.roles)
        if self.smem.num_bytes > gpu.smem_bytes:
            raise PlanError(
                f"shared memory is {self.smem.num_bytes:,} B, "
                f"the {gpu.name} has {gpu.smem_bytes:,} B a block; take fewer stages"
            )


def check_roles(roles: tuple[Role, ...]) -> None:
    """Whole warpgroups wherever register counts differ, and counts that `setmaxnreg` and the
    register file allow.

    `setmaxnreg` takes multiples of 8 from 24 to 256 and counts for a warpgroup (PTX ISA,
    setmaxnreg).
    """
    regs = [role.num_regs for role in roles for _ in range(role.num_warps)]
    if len(regs) % WARPGROUP_WARPS:
        raise PlanError(f"roles must fill whole warpgroups of 4 warps, got {len(regs)} warps")
    for first in range(0, len(regs), WARPGROUP_WARPS):
        if len(set(regs[first : first + WARPGROUP_WARPS])) != 1:
            raise PlanError(
                f"warps {first}..{first + 3} are one warpgroup and need one register count, "
                f"got {regs[first : first + WARPGROUP_WARPS]}"
            )
    for role in roles:
        if role.num_regs % 8 or not 24 <= role.num_regs <= 256:
            raise PlanError(
                f"registers of role {role.name} must be a multiple of 8 in 24..256, "
                f"got {role.num_regs}"
            )
    num_threads = WARP_THREADS * len(regs)
    launch_regs = min(REGISTER_FILE // num_threads // 8 * 8, 255 // 8 * 8)
    granted = num_threads * launch_regs
    wanted = WARP_THREADS * sum(regs)
    if wanted > granted:
        raise PlanError(
            f"roles want {wanted:,} registers, a block of {num_threads} threads gets {granted:,}; "
            "give some role fewer"
        )
