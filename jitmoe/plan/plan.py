"""Plans: every number a kernel needs and none it does not.

`Plan` is all that `jit/` and `run/launch.py` know of a kernel; `MegaMoePlan` is the fused layer's.
Constraints are checked once, in `check()`, by the heuristic and by sweeps alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from jitmoe.plan.gpu import KERNEL_ARCHS, GpuSpec
from jitmoe.plan.memory_map import MemoryMap, Region, align, ceil_div
from jitmoe.plan.problem import QUANT_GROUP, MoeProblem

WARP_THREADS = 32
WARPGROUP_WARPS = 4
REGISTER_FILE = 65_536  # 32-bit registers of one SM, handed to warps in multiples of 8 per thread
# Rows of gate and of up alternate in groups of 8: both land in one thread's accumulators.
ROW_GROUP = 8


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
        own = {name: value for name, value in own.items() if isinstance(value, int)}
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


@dataclass(frozen=True)
class MegaMoePlan(Plan):
    """The whole layer in one launch. Weights are always the 64-row operand of the tensor core,
    tokens its columns.

    A tile is 256 weight rows (128 channels of gate and up, or 256 of down) by up to `block_tokens`
    tokens. In the `decode` bucket the two math warpgroups split the rows and share up to 64 tokens;
    in the `prefill` bucket each takes all rows for 64 tokens of its own.
    """

    bucket: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_stages: int
    num_local_pairs: int
    producer_regs: int
    math_regs: int
    unroll_k: int
    num_task_slots: int = 2

    name = "mega_moe"
    block_rows = 256
    block_k = QUANT_GROUP
    num_gather_warps = 2
    num_math_warps = 8

    @property
    def block_tokens(self) -> int:
        return 64 if self.bucket == "decode" else 128

    @property
    def split_tokens(self) -> bool:
        """Warpgroups split a tile's tokens (prefill) or its weight rows (decode)."""
        return self.bucket == "prefill"

    @property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("load", 1, self.producer_regs, "TMA: weight tiles into the ring"),
            Role(
                "schedule", 1, self.producer_regs, "claim tasks, publish them and their token rows"
            ),
            Role(
                "gather",
                self.num_gather_warps,
                self.producer_regs,
                "token rows and scales into the ring",
            ),
            Role(
                "math", self.num_math_warps, self.math_regs, "GEMMs, SwiGLU, re-quantise, combine"
            ),
        )

    @property
    def num_k_blocks_1(self) -> int:
        return self.hidden // self.block_k

    @property
    def num_k_blocks_2(self) -> int:
        return ceil_div(self.intermediate, self.block_k)

    @property
    def num_tiles_1(self) -> int:
        """Weight-row tiles of GEMM 1 for one expert: 128 channels of gate and up each."""
        return ceil_div(self.intermediate, self.block_rows // 2)

    @property
    def num_tiles_2(self) -> int:
        return ceil_div(self.hidden, self.block_rows)

    @property
    def derived_constants(self) -> dict[str, int]:
        warpgroup_rows = self.block_rows if self.split_tokens else self.block_rows // 2
        return {
            "block_tokens": self.block_tokens,
            "block_rows": self.block_rows,
            "block_k": self.block_k,
            "split_tokens": int(self.split_tokens),
            "num_row_blocks": warpgroup_rows // 64,
            "num_gather_warps": self.num_gather_warps,
            "num_math_warps": self.num_math_warps,
            "num_k_blocks_1": self.num_k_blocks_1,
            "num_k_blocks_2": self.num_k_blocks_2,
            "num_tiles_1": self.num_tiles_1,
            "num_tiles_2": self.num_tiles_2,
            "mid_stride": align(self.intermediate, QUANT_GROUP),
            "mid_scale_stride": align(self.num_k_blocks_2, 8),
            "x_quant_scale_stride": align(self.num_k_blocks_1, 8),
            "weight_tile_bytes": self.block_rows * self.block_k,
            "token_tile_bytes": self.block_tokens * self.block_k,
            # One block of w13_scale can hold the end of gate and the start of up.
            "up_block_offset": self.intermediate // QUANT_GROUP,
            "up_block_rest": self.intermediate % QUANT_GROUP,
        }

    @cached_property
    def smem(self) -> MemoryMap:
        stages, slots, tokens = self.num_stages, self.num_task_slots, self.block_tokens
        math, rows_apart = self.num_math_warps, 4 * self.num_gather_warps
        return MemoryMap(
            (
                Region(
                    "weight_tiles",
                    "u8",
                    (stages, self.block_rows * self.block_k),
                    1024,
                    "load -> math",
                ),
                Region(
                    "token_tiles", "u8", (stages, tokens * self.block_k), 1024, "gather -> math"
                ),
                Region("token_scales", "f32", (stages, tokens), 128, "gather -> math"),
                Region("weight_scales", "f32", (stages, 4), 16, "gather -> math"),
                Region(
                    "row_offsets", "u32", (rows_apart, tokens // rows_apart), 16, "gather's own"
                ),
                Region("transpose", "u8", (math, 1024), 128, "a math warp's own"),
                Region("amax", "f32", (2, math, 64), 128, "math <-> math, by parity"),
                Region("full", "u64", (stages,), 8, "load, gather -> math"),
                Region("empty", "u64", (stages,), 8, "math -> load, gather"),
                Region("task_full", "u64", (slots,), 8, "schedule -> load, gather, math"),
                Region("task_empty", "u64", (slots,), 8, "load, gather, math -> schedule"),
                Region("tasks", "u32", (slots, 8), 16, "schedule -> load, gather, math"),
                Region("task_rows", "u32", (slots, tokens), 16, "schedule -> gather, math"),
                Region("row_start", "u32", (self.num_experts + 1,), 4, "routing -> schedule"),
                Region("block_start", "u32", (self.num_experts + 1,), 4, "routing -> schedule"),
                Region(
                    "local_rows", "u16", (max(self.num_local_pairs, 2),), 4, "routing -> schedule"
                ),
            )
        )

    def scratch(self, num_tokens: int) -> MemoryMap:
        """Regions of a workspace that hold nothing between launches."""
        pairs, c = max(num_tokens, 1) * self.top_k, self.derived_constants
        tokens = max(num_tokens, 1)
        return MemoryMap(
            (
                Region("x_quant", "u8", (tokens, self.hidden), 256),
                Region("x_quant_scale", "f32", (tokens, c["x_quant_scale_stride"]), 256),
                Region("row_pairs", "u32", (pairs,), 256),
                Region("mid", "u8", (pairs, c["mid_stride"]), 256),
                Region("mid_scale", "f32", (pairs, c["mid_scale_stride"]), 256),
                Region("slices", "u16", (pairs, self.hidden), 256),
            )
        )

    def bank_words(self, num_tokens: int) -> int:
        """32-bit words of one bank of counters; the header is described in
        templates/roles/routing.cuh.
        """
        max_blocks = ceil_div(num_tokens * self.top_k, self.block_tokens) + self.num_experts
        return align(96 + self.num_experts + max_blocks, 32)

    def control(self, num_tokens: int) -> MemoryMap:
        """Regions that must be zero before the first launch; launches leave them ready for the
        next.
        """
        words, tokens = self.bank_words(num_tokens), max(num_tokens, 1)
        return MemoryMap(
            (
                Region("header", "u32", (64,), 256, "launch parity, exits, abort"),
                Region("banks", "u32", (2, words), 256, "counters, by launch parity"),
                Region("combine_count", "u32", (tokens, self.num_tiles_2), 256, "self-resetting"),
            )
        )

    def workspace_bytes(self, num_tokens: int) -> int:
        """Device memory a workspace needs for calls of up to `num_tokens` tokens."""
        return self.scratch(num_tokens).num_bytes + self.control(num_tokens).num_bytes

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("w13_map", "TensorMap", "(hidden, 8 rows, gate|up, intermediate/8, expert)"),
            Param("w2_map", "TensorMap", "(intermediate, hidden, expert)"),
            Param("x", "const u8*", "[num_tokens, hidden] e4m3 or bf16"),
            Param("x_scale", "const float*", "[num_tokens, hidden/128], e4m3 only"),
            Param("topk_ids", "const u8*", "[num_tokens, top_k] i32 or i64"),
            Param("topk_weights", "const u8*", "[num_tokens, top_k] f32 or bf16"),
            Param(
                "w13_scale", "const float*", "[num_experts, ceil(2*intermediate/128), hidden/128]"
            ),
            Param("w2_scale", "const float*", "[num_experts, hidden/128, ceil(intermediate/128)]"),
            Param("y", "u16*", "[num_tokens, hidden] bf16"),
            Param("x_quant", "u8*", "scratch"),
            Param("x_quant_scale", "float*", "scratch"),
            Param("row_pairs", "u32*", "scratch"),
            Param("mid", "u8*", "scratch"),
            Param("mid_scale", "float*", "scratch"),
            Param("slices", "u16*", "scratch, [num_tokens, top_k, hidden] bf16"),
            Param("header", "u32*", "control"),
            Param("banks", "u32*", "control"),
            Param("combine_count", "u32*", "control, [num_tokens, num_tiles_2]"),
            Param("status", "u32*", "host memory, read by the host after a timeout"),
            Param("x_stride", "i64", "bytes from token to token"),
            Param("x_scale_token_stride", "i64", "elements"),
            Param("x_scale_group_stride", "i64", "elements"),
            Param("w13_scale_expert_stride", "i64", "elements"),
            Param("w2_scale_expert_stride", "i64", "elements"),
            Param("w13_scale_row_stride", "i64", "elements"),
            Param("w2_scale_row_stride", "i64", "elements"),
            Param("y_stride", "i64", "elements"),
            Param("num_tokens", "u32"),
            Param("bank_words", "u32"),
            Param("x_is_bf16", "u32"),
            Param("ids_are_i64", "u32"),
            Param("weights_are_bf16", "u32"),
            Param("timeout_us", "u32", "budget of every wait"),
        )

    def check(self, gpu: GpuSpec) -> None:
        if self.arch not in KERNEL_ARCHS:
            raise PlanError(
                f"the kernel exists for {', '.join(KERNEL_ARCHS)}, the plan is for {self.arch}"
            )
        if self.bucket not in ("decode", "prefill"):
            raise PlanError(f"bucket must be decode or prefill, got {self.bucket!r}")
        try:
            MoeProblem(0, self.hidden, self.intermediate, self.num_experts, self.top_k)
        except ValueError as error:
            raise PlanError(str(error)) from None
        if self.num_stages < 3:
            raise PlanError(
                f"the ring needs 3 stages to keep loads in flight, got {self.num_stages}"
            )
        if self.num_task_slots < 2:
            raise PlanError(f"claiming ahead needs 2 task slots, got {self.num_task_slots}")
        if not 0 <= self.num_local_pairs <= 65_535:
            raise PlanError(
                f"local rows are 16-bit pair numbers, got room for {self.num_local_pairs:,}"
            )
        if not 1 <= self.unroll_k <= 8:
            raise PlanError(f"unroll_k must be from 1 to 8 k-blocks, got {self.unroll_k}")
        super().check(gpu)
