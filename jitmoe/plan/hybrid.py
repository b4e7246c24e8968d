"""HybridPlan: what dispatch and combine between several nodes share, and the memory for it.

Ranks of a node reach each other's memory; a rank sends to other nodes along its rail, to the ranks
with its own place there (DeepEP's hybrid kernels are the model: github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.memory_map import MemoryMap, Region, align, ceil_div
from jitmoe.plan.plan import Param, PlanError
from jitmoe.plan.transfer import TransferPlan

# How rows go along the rail: templates/device/rail_*.cuh.
RAILS = ("memory", "delayed", "gin")
MAX_NODES = 32  # a lane for each
MAX_NODE_RANKS = 32  # a bit for each
MAX_BLOCK_CHANNELS = 8
# What a rank's network card sends: 400 Gbit/s (guess: one ConnectX-7 for each GPU).
RAIL_GBPS = 50
# What a block writes: 45 to 54 in a dispatch (8 virtual ranks of 2 to 4 blocks, H200, 2026-12-01).
WRITTEN_GBPS = 45
_QUEUED_PUTS = 7  # of a warp, rail "delayed"


@dataclass(frozen=True)
class HybridPlan(TransferPlan):
    """num_nodes  of as many ranks each, node by node
    rail       "memory" copies to memory that this GPU reaches, "delayed" does so late and out of
               order, to test with, "gin" takes NCCL's network transport
    """

    num_nodes: int = 2
    rail: str = "memory"

    symmetric_names = (
        *("launches", "counts_ready", "rows_ready", "sums_wanted"),
        *("rail_entered", "rail_tails", "arrived"),
        *("counts", "records", "rows", "row_scales", "sent", "came", "node_sums", "sums"),
    )

    @property
    def node_ranks(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def max_parts(self) -> int:
        """Sums that come home for a token: nodes that it can have experts on."""
        return min(self.top_k, self.num_nodes)

    @property
    def max_node_parts(self) -> int:
        """Rows of a token that come together on a node: ranks there that can have experts of it."""
        return min(self.top_k, self.node_ranks)

    @property
    def count_words(self) -> int:
        """Of a rank's counts: a multiple of 16 bytes, as the rail takes them."""
        return align(self.num_columns, 4)

    @property
    def message_words_at(self) -> int:
        """Bytes into a message: its words come behind the row and its scales."""
        return align(self.row_bytes + 4 * self.num_groups, 16)

    @property
    def message_bytes(self) -> int:
        """What goes to a node for a token; its words: templates/roles/messages.cuh."""
        return align(self.message_words_at + 4 * (1 + 4 * self.top_k), 128)

    @property
    def most_channels(self) -> int:
        """Of a block. NCCL's functions are called, and with 8 channels registers spill around the
        calls.
        """
        return 6 if self.rail == "gin" else MAX_BLOCK_CHANNELS

    @property
    def block_channels(self) -> int:
        """Channels of a block: warps that send along the rail, and as many that receive."""
        raise NotImplementedError

    def rail_regions(self, num_warps: int) -> tuple[Region, ...]:
        """Shared memory of the rail, of each warp of a block."""
        if self.rail != "delayed":
            return ()
        note = "puts that wait"
        return (Region("rail_queue", "u32", (num_warps, _QUEUED_PUTS + 1, 4), 16, note),)

    def rail_bytes(self, num_warps: int) -> int:
        return sum(region.num_bytes for region in self.rail_regions(num_warps))

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("nccl_device",) if self.rail == "gin" else ()

    @property
    def derived_constants(self) -> dict[str, int]:
        return super().derived_constants | {
            "node_ranks": self.node_ranks,
            "max_node_parts": self.max_node_parts,
            "count_words": self.count_words,
            "message_words_at": self.message_words_at,
            "message_bytes": self.message_bytes,
            "block_channels": self.block_channels,
            "max_channels": self.max_blocks * MAX_BLOCK_CHANNELS,
        }

    @property
    def rank_params(self) -> tuple[Param, ...]:
        return (
            *super().rank_params,
            Param("rail_peers", "u8* const*", "by node: memory of the rail peer, if reached so"),
            Param("rail_comm", "const u8*", "NCCL's device communicator, rail gin"),
            Param("rail_window", "u8*", "NCCL's window of symmetric memory, rail gin"),
            Param("rail_offset", "i64", "of symmetric memory in that window, bytes"),
            Param("rank_capacity", "u32", "tokens that each rank's memory has room for"),
            Param("rank_tokens", "u32", "most tokens of any rank"),
            Param("channel_tokens", "u32", "tokens of a channel, the same on all ranks"),
        )

    def busy_blocks(self, gpu: GpuSpec) -> float:
        """Over a network, of what takes longer, rail or links, when tokens are routed evenly: a
        token then has so many nodes and ranks, and its rank writes a message, and a row for each
        rank.
        """
        if self.rail != "gin":
            return super().busy_blocks(gpu)
        k = self.top_k
        nodes, ranks = (n * (1 - (1 - 1 / n) ** k) for n in (self.num_nodes, self.num_ranks))
        on_rail = nodes * (1 - 1 / self.num_nodes) / RAIL_GBPS
        on_links = ranks * (1 - 1 / self.node_ranks) / gpu.link_gbps
        return max(4, (1 + ranks) / max(on_rail, on_links) / WRITTEN_GBPS)

    def channel_tokens(self, rank_tokens: int, num_blocks: int) -> int:
        """Tokens of a channel when no rank has more than `rank_tokens`."""
        return ceil_div(max(rank_tokens, 1), num_blocks * self.block_channels)

    def symmetric(self, rank_tokens: int) -> MemoryMap:
        tokens = max(rank_tokens, 1)
        return _symmetric(self.memory_plan, tokens, self.num_rows(tokens))

    @property
    def memory_plan(self) -> HybridPlan:
        """What the memory depends on, the same for dispatch and combine."""
        names = HybridPlan.__dataclass_fields__
        return HybridPlan(**{name: getattr(self, name) for name in names})

    def check_fields(self) -> None:
        super().check_fields()
        if self.rail not in RAILS:
            raise PlanError(f"rail must be one of {', '.join(RAILS)}, got {self.rail!r}")
        if not 2 <= self.num_nodes <= MAX_NODES or self.num_ranks % self.num_nodes:
            raise PlanError(
                f"num_nodes must be 2 to {MAX_NODES} and share out {self.num_ranks} ranks, got "
                f"{self.num_nodes}"
            )
        if self.node_ranks > MAX_NODE_RANKS:
            raise PlanError(
                f"a node may have up to {MAX_NODE_RANKS} ranks, got {self.node_ranks}; take more "
                "nodes"
            )


@cache
def _symmetric(plan: HybridPlan, tokens: int, rows: int) -> MemoryMap:
    ranks, nodes, hidden = plan.num_ranks, plan.num_nodes, plan.hidden
    channels = plan.max_blocks * MAX_BLOCK_CHANNELS
    groups = plan.num_groups
    launch = "by rank: a launch's number + 1"
    return MemoryMap(
        (
            Region("launches", "u32", (1,), 256, "number of the next launch", True),
            Region("counts_ready", "u32", (ranks,), 256, launch, True),
            Region("rows_ready", "u32", (ranks,), 256, "the same", True),
            Region("sums_wanted", "u32", (ranks,), 256, "the same", True),
            Region("rail_entered", "u64", (nodes,), 256, "by node: launches of the peer", True),
            Region("rail_tails", "u64", (nodes, channels), 256, "how far a channel is", True),
            Region("arrived", "u32", (nodes, tokens), 256, "ranks that sent a token's row", True),
            Region("counts", "u32", (ranks, plan.count_words), 256, "by rank they are of"),
            Region("records", "u32", (ranks * tokens, plan.record_words), 256, "that came"),
            Region("rows", "u8", (rows, plan.row_bytes), 256, "that came"),
            Region("row_scales", "f32", (rows if groups else 0, groups), 256),
            Region("sent", "u8", (tokens, plan.message_bytes), 256, "messages to nodes"),
            Region("came", "u8", (nodes - 1, tokens, plan.message_bytes), 256, "messages of nodes"),
            Region("node_sums", "u16", (nodes, tokens, plan.max_node_parts, hidden), 256),
            Region("sums", "u16", (tokens, plan.max_parts, hidden), 256, "that come back"),
        )
    )
