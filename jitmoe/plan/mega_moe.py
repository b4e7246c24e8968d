"""MegaMoePlan: every number of the fused layer's kernel, and the memory it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitmoe.plan import (
    mega_moe_check,
    mega_moe_constants,
    mega_moe_params,
    mega_moe_scratch,
    mega_moe_smem,
    variant,
)
from jitmoe.plan.formats import format_of
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.memory_map import MemoryMap, Region, align, ceil_div
from jitmoe.plan.plan import WARP_THREADS, Param, Plan, PlanError, Role
from jitmoe.plan.problem import MX_GROUP, QUANT_GROUP


@dataclass(frozen=True)
class MegaMoePlan(Plan):
    """The whole layer in one launch. A tile is 256 weight rows (128 channels of gate and up, or 256
    of down, or of w13 without a gate) by up to `block_tokens` tokens of one expert.

    decode   weights are the 64-row operand of the tensor cores, tokens its 8 to 64 columns; the two
             math warpgroups split the rows. Token rows are gathered where they lie.
    prefill  tokens are the 64-row operand; each warpgroup takes 64 tokens of its own. Tiles of
             up to 64 tokens are done as in decode. Token rows are first copied into a pool, sorted
             by expert, which TMA reads.

    Scales of 128 x 128 weights multiply partial sums, those of channels and tensors a tile's sums.
    With `trace`, every warp stamps what it does and when into a ring of global memory.
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
    num_packed_stages: int = 0  # of weights that wait to be expanded
    extra_tokens: int = 0  # prefill: most that an expert's last full tile takes beyond its own
    trace: bool = False
    activation: str = "swiglu"
    up_first: bool = False
    weight_on_input: bool = False
    batch_invariant: bool = False  # a token's sums do not depend on how many tiles there are
    interleaved: bool = False
    has_bias: bool = False
    format: str = "fp8_block"
    num_ranks: int = 1
    local_ranks: int = 1  # that one launch serves, with as many blocks each
    presum: bool = False  # a rank sums a token's rows before they travel

    name = "mega_moe"
    block_rows = 256
    block_k_bytes = 128  # of a row in a k-block: the swizzle's span
    num_gather_warps = 2
    num_expand_warps = 4
    num_math_warps = 8
    trace_capacity = 8192  # stamps of a warp that are kept, the newest
    max_blocks = 144  # of a launch: the SMs of a full GH100

    @property
    def split_tokens(self) -> bool:
        """Warpgroups split a tile's tokens (prefill) or its weight rows (decode)."""
        return self.bucket == "prefill"

    @property
    def block_k(self) -> int:
        """Channels of a k-block: 128 bytes of a token, or in decode as MXFP4 weights land."""
        return self.landing_k // self.landing_blocks

    @property
    def landing_k(self) -> int:
        """Channels of a weight row that land together: 128 bytes, but 64 of MXFP4 that is expanded
        in shared memory or multiplied by bf16 tokens.
        """
        form = format_of(self.format)
        if form.is_mx:
            is_wide = self.has_chunk_scales and self.quantizes
            return 2 * QUANT_GROUP if is_wide else QUANT_GROUP
        return self.block_k_bytes // form.element_bytes

    @property
    def landing_blocks(self) -> int:
        """k-blocks that land together: two where weights are expanded to bf16."""
        return format_of(self.format).element_bytes if self.expands else 1

    @property
    def weight_k_bytes(self) -> int:
        """Of a weight row that land together."""
        return format_of(self.format).weight_bytes(self.landing_k)

    @property
    def token_k_bytes(self) -> int:
        """Of a token in a k-block."""
        return self.block_k * format_of(self.format).element_bytes

    @property
    def ordered_bytes(self) -> int:
        """Of a token, whose channels are ordered among themselves: channel_order.cuh."""
        element_bytes = format_of(self.format).element_bytes
        return MX_GROUP * element_bytes if self.has_chunk_scales else 16

    @property
    def is_mx(self) -> bool:
        return format_of(self.format).is_mx

    @property
    def expands(self) -> bool:
        """Whether MXFP4 weights are expanded in shared memory, by warps of their own."""
        return self.is_mx and self.split_tokens

    @property
    def has_chunk_scales(self) -> bool:
        """Whether math warps expand MXFP4 weights, with a scale for a chunk of 32 codes."""
        return self.is_mx and not self.expands

    @property
    def promotes(self) -> bool:
        """Whether partial sums of a k-block are scaled, rather than accumulate_*.cuh's own."""
        return self.quantizes and not self.has_chunk_scales

    @property
    def quantizes(self) -> bool:
        """Whether tokens and what is between the GEMMs are rounded to FP8 codes with scales."""
        return format_of(self.format).quantizes

    @property
    def block_tokens(self) -> int:
        return 128 if self.split_tokens else 64

    def needs_whole_grid(self, num_tokens: int, x_is_bf16: bool) -> bool:
        """Whether CTAs of a launch wait for all others, so that all must be resident. If not, CTAs
        may start while the launch before them in the stream ends.
        """
        local = not self.split_tokens and num_tokens * self.top_k <= self.num_local_pairs
        return not local or (x_is_bf16 and self.quantizes) or self.num_ranks > 1

    @property
    def tile_tokens(self) -> int:
        """Most tokens of a tile."""
        return self.block_tokens + self.extra_tokens

    @property
    def token_boxes(self) -> dict[str, int]:
        """Prefill: rows of one copy of a tile's tokens, which takes one or two, and of its extra
        tokens, by what the names of the tensor maps end in.
        """
        half = self.block_tokens // 2
        return {"map": half, "extra_map": self.extra_tokens or half}

    @property
    def roles(self) -> tuple[Role, ...]:
        regs, scales = self.producer_regs, " and scales" * self.quantizes
        load = Role("load", 1, regs, "TMA: weight tiles into the ring")
        schedule = Role("schedule", 1, regs, "claim tasks, publish them and their token rows")
        gather = Role("gather", self.num_gather_warps, regs, f"token rows{scales} into the ring")
        feed = Role("feed", 1, regs, f"TMA: token tiles{scales} into the ring")
        jobs = f"GEMMs, {variant.FUNCTIONS[self.activation]}{', re-quantise' * self.quantizes}"
        jobs += ", combine" if self.split_tokens else ""
        math = Role("math", self.num_math_warps, self.math_regs, jobs)
        if self.split_tokens:
            deliver = Role("deliver", 1, regs, "tell other blocks of tiles, list tokens to combine")
            expand = Role(
                "expand", self.num_expand_warps, regs, "weights from e2m1 to the tokens' type"
            )
            return (load, schedule, feed, deliver, *[expand] * self.expands, math)
        deliver = Role("deliver", 4, regs, "tell other blocks of tiles, combine")
        return (load, schedule, gather, deliver, math)

    @property
    def num_k_blocks_1(self) -> int:
        return ceil_div(self.hidden, self.block_k)

    @property
    def num_k_blocks_2(self) -> int:
        return ceil_div(self.intermediate, self.block_k)

    @property
    def token_groups(self) -> int:
        """Scales of a token in a k-block, with FP8 codes."""
        return ceil_div(self.block_k, QUANT_GROUP)

    @property
    def num_tiles_1(self) -> int:
        """Weight-row tiles of GEMM 1 for one expert: 128 channels of gate and up each, or 256."""
        rows = variant.rows_per_channel(self.activation) * self.intermediate
        return ceil_div(rows, self.block_rows)

    @property
    def num_tiles_2(self) -> int:
        return ceil_div(self.hidden, self.block_rows)

    @property
    def derived_constants(self) -> dict[str, int]:
        return mega_moe_constants.constants(self)

    @property
    def landing_bytes(self) -> int:
        """Of a tile's weights that land together."""
        return self.block_rows * self.weight_k_bytes

    @property
    def weight_tile_bytes(self) -> int:
        """As the tensor cores or math warps read them."""
        return self.block_rows * self.block_k_bytes if self.expands else self.landing_bytes

    @property
    def mx_bytes(self) -> int:
        """Of MXFP4's scales that land with a tile's weights, as jitmoe/mxfp4.py packs them."""
        bits = self.landing_k // MX_GROUP * (4 if self.quantizes else 8)
        return self.block_rows * bits // 8 * self.is_mx

    @property
    def num_load_stages(self) -> int:
        """Of the ring that weights land in."""
        return self.num_packed_stages if self.expands else self.num_stages

    @cached_property
    def smem(self) -> MemoryMap:
        return mega_moe_smem.smem(self)

    @property
    def row_align(self) -> int:
        """First row of every expert: bulk copies of a tile's scales start at 16 bytes."""
        return 4 if self.split_tokens else 1

    def row_capacity(self, num_tokens: int) -> int:
        """Rows between the GEMMs for `num_tokens` tokens: routed pairs, gaps before experts, and a
        tile that the last copy may read past the end.
        """
        pairs = max(num_tokens, 1) * self.top_k
        gaps = (self.row_align - 1) * self.num_experts
        return align(pairs + gaps, self.block_tokens) + self.block_tokens

    def scratch(self, num_tokens: int) -> MemoryMap:
        """Regions of a workspace that hold nothing between launches."""
        return mega_moe_scratch.scratch(self, num_tokens)

    def trace_rings(self, num_blocks: int) -> Region:
        """A traced kernel's stamps, of 4 words, by block and warp: templates/device/stamps.cuh."""
        warps = self.num_threads // WARP_THREADS
        return Region("trace", "u32", (num_blocks, warps, self.trace_capacity, 4), 256)

    def bank_words(self, num_tokens: int) -> int:
        """32-bit words of one bank of counters; the header is described in
        templates/roles/bank.cuh.
        """
        max_blocks = ceil_div(num_tokens * self.top_k, self.block_tokens) + self.num_experts
        counters = 128 + 3 * self.max_blocks + self.num_experts + max_blocks
        return align(counters + (self.num_ranks > 1) * (64 + self.num_experts), 32)

    def control(self, num_tokens: int) -> MemoryMap:
        """Regions that must be zero before the first launch; launches leave them ready for the
        next.
        """
        return mega_moe_scratch.control(self, num_tokens)

    def symmetric(self, rank_tokens: int) -> MemoryMap:
        """What ranks write for each other, for up to `rank_tokens` tokens of each; the same in both
        buckets.
        """
        return mega_moe_scratch.symmetric(self, rank_tokens)

    def workspace_bytes(self, num_tokens: int) -> int:
        """Device memory a workspace needs for calls of up to `num_tokens` tokens."""
        return self.scratch(num_tokens).num_bytes + self.control(num_tokens).num_bytes

    @property
    def params(self) -> tuple[Param, ...]:
        has_channel_scales = format_of(self.format).has_channel_scales
        return mega_moe_params.params(
            self.trace, self.has_bias, has_channel_scales, self.num_ranks > 1
        )

    def check(self, gpu: GpuSpec) -> None:
        mega_moe_check.check(self)
        super().check(gpu)
        if gpu.num_sms > self.max_blocks:
            raise PlanError(
                f"counters have room for {self.max_blocks} blocks of a launch, the {gpu.name} has "
                f"{gpu.num_sms} SMs"
            )
