"""TransferPlan: what the plans of dispatch and combine share, and the memory that ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.memory_map import MemoryMap, Region, ceil_div
from jitmoe.plan.plan import Param, Plan, PlanError
from jitmoe.plan.problem import MAX_RANKS, MAX_TOP_K, QUANT_GROUP

# Symmetric regions, in the order of their offsets among the parameters.
SYMMETRIC = (
    *("launches", "counts_ready", "rows_ready", "sums_wanted", "sums_ready"),
    *("counts", "records", "rows", "row_scales", "sums"),
)
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}
# What a block adds to what a rank sends: of 390 GB/s that a copy reaches between two GPUs, 12, 24,
# 64 and 132 blocks send 244, 258, 324 and 334 (dispatch of 8,192 tokens, two H200, 2026-11-30).
BLOCK_GBPS = 9


@dataclass(frozen=True)
class TransferPlan(Plan):
    """Tokens to the ranks that hold their experts, or what comes of them back.

    num_experts   of each rank
    expert_rows   a row for each expert that a token has, experts one after the other, else one
                  for each rank
    alignment     of experts' first rows, with expert_rows
    format        of the rows that travel to experts: bf16 or fp8 with a scale for 128 channels
    local_ranks   that one launch serves, with as many blocks each
    """

    hidden: int
    num_experts: int
    top_k: int
    num_ranks: int
    format: str = "bf16"
    expert_rows: bool = False
    alignment: int = 1
    local_ranks: int = 1

    max_blocks = 144  # of a rank in a launch: the SMs of a full GH100
    trace = False
    symmetric_names = SYMMETRIC

    @property
    def row_bytes(self) -> int:
        return self.hidden * ELEMENT_BYTES[self.format]

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        return ceil_div(self.hidden, QUANT_GROUP) if self.format == "fp8" else 0

    @property
    def num_all_experts(self) -> int:
        return self.num_ranks * self.num_experts

    @property
    def num_columns(self) -> int:
        """Counts that a rank tells: pairs of every expert, then tokens of every rank."""
        return self.num_all_experts + self.num_ranks

    @property
    def count_words(self) -> int:
        """Room for them."""
        return self.num_columns

    @property
    def record_words(self) -> int:
        """Of a token that came: see templates/roles/records.cuh."""
        return 2 + (3 if self.expert_rows else 2) * self.top_k

    @property
    def max_parts(self) -> int:
        """Sums that come home for a token: ranks that it can have experts on."""
        return min(self.top_k, self.num_ranks)

    @property
    def rank_params(self) -> tuple[Param, ...]:
        """Parameters by which a kernel knows its ranks and their memory."""
        return (
            Param("peers", "u8* const*", "symmetric memory of every rank"),
            *(Param(f"{name}_at", "i64", "bytes into it") for name in self.symmetric_names),
            Param("rank", "u32"),
            Param("bank_words", "u32"),
            Param("timeout_us", "u32", "budget of every wait"),
        )

    @property
    def derived_constants(self) -> dict[str, int]:
        return {
            "row_bytes": self.row_bytes,
            "quantizes": int(self.format == "fp8"),
            "num_groups": self.num_groups,
            "count_words": self.count_words,
            "record_words": self.record_words,
            "max_parts": self.max_parts,
            "max_blocks": self.max_blocks,
            "trace": int(self.trace),
        }

    def num_rows(self, rank_tokens: int) -> int:
        """Most rows that can come to a rank when each has up to `rank_tokens` tokens."""
        tokens = self.num_ranks * rank_tokens
        if not self.expert_rows:
            return tokens
        pairs = tokens * min(self.top_k, self.num_experts)
        return pairs + (self.alignment - 1) * self.num_experts

    def scratch(self, num_tokens: int) -> MemoryMap:
        """Regions of a workspace that hold nothing between launches."""
        counts = Region("block_counts", "u32", (self.max_blocks, self.num_columns), 256)
        return MemoryMap((counts,))

    def bank_words(self, num_tokens: int) -> int:
        return 192

    def control(self, num_tokens: int) -> MemoryMap:
        """Regions that must be zero before the first launch."""
        words = self.bank_words(num_tokens)
        return MemoryMap(
            (
                Region("header", "u32", (64,), 256, "launch parity, abort"),
                Region("banks", "u32", (2, words), 256, "counters, by launch parity"),
            )
        )

    def busy_blocks(self, gpu: GpuSpec) -> float:
        """Blocks of a rank that keep its links busy."""
        return gpu.link_gbps / BLOCK_GBPS

    def symmetric(self, rank_tokens: int) -> MemoryMap:
        """Regions of a rank that other ranks write; the same for dispatch and combine."""
        counts = self.num_ranks, self.num_columns, self.record_words, self.max_parts
        rows = self.num_rows(max(rank_tokens, 1)), self.row_bytes, self.num_groups
        return _symmetric(max(rank_tokens, 1), self.hidden, *counts, *rows)

    def workspace_bytes(self, num_tokens: int) -> int:
        return self.scratch(num_tokens).num_bytes + self.control(num_tokens).num_bytes

    def check_fields(self) -> None:
        """Raise PlanError unless there is a kernel for these sizes."""
        if self.format not in ELEMENT_BYTES:
            raise PlanError(f"format must be bf16 or fp8, got {self.format!r}")
        step = QUANT_GROUP if self.format == "fp8" else 8
        if self.hidden < step or self.hidden % step:
            raise PlanError(f"hidden must be a multiple of {step}, got {self.hidden}; pad tokens")
        for name, value, most in (
            ("top_k", self.top_k, MAX_TOP_K),
            ("num_ranks", self.num_ranks, MAX_RANKS),
            ("num_experts", self.num_experts, 1024),
        ):
            if not 1 <= value <= most:
                raise PlanError(f"{name} must be 1 to {most}, got {value}")
        if self.alignment < 1 or (self.alignment > 1 and not self.expert_rows):
            raise PlanError(
                f"alignment must be at least 1, and 1 unless rows are sorted by expert, got "
                f"{self.alignment}"
            )

    def check(self, gpu: GpuSpec) -> None:
        self.check_fields()
        super().check(gpu)


@cache
def _symmetric(
    tokens: int,
    hidden: int,
    ranks: int,
    columns: int,
    record_words: int,
    parts: int,
    rows: int,
    row_bytes: int,
    groups: int,
) -> MemoryMap:
    return MemoryMap(
        (
            Region("launches", "u32", (1,), 256, "number of the next launch", True),
            Region("counts_ready", "u32", (ranks,), 256, "by rank: a launch's number + 1", True),
            Region("rows_ready", "u32", (ranks,), 256, "the same", True),
            Region("sums_wanted", "u32", (ranks,), 256, "the same", True),
            Region("sums_ready", "u32", (ranks,), 256, "the same", True),
            Region("counts", "u32", (ranks, columns), 256, "by rank they are of"),
            Region("records", "u32", (ranks * tokens, record_words), 256, "of tokens that came"),
            Region("rows", "u8", (rows, row_bytes), 256, "that came"),
            Region("row_scales", "f32", (rows if groups else 0, groups), 256),
            Region("sums", "u16", (tokens, parts, hidden), 256, "that come back"),
        )
    )


def num_sms_wanted(gpu: GpuSpec, plan: TransferPlan) -> int:
    """Blocks of a rank that keep its links busy, a quarter more, and an even number; all of the GPU
    where ranks share it, and where it has no links.
    """
    if plan.local_ranks > 1 or gpu.link_gbps == 0:
        return gpu.num_sms
    return min(gpu.num_sms, 2 * ceil(1.25 * plan.busy_blocks(gpu) / 2))
