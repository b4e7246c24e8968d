"""Proof that the emulator misses little: break the kernels on purpose, one place at a time.

A mutant is a kernel text without one synchronising operation, with one ordering made relaxed, or
with one term of an address or coordinate gone. It is killed if its checked emulation reports a
race, a stall or a broken rule, or if its result is wrong. What survives is a hole in the emulator
or does the same as the original; the latter are listed in EQUIVALENT, each with its reason.

    python tests/mutations.py [--only TEXT] [--kernel NAME] [--sample N] [--seeds N] [--jobs N]
                              [--list]
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import numpy as np
import transfer_mutations
from parts import with_small_parts
from transfer_mutations import TransferCase

from jitmoe import fp8, reference
from jitmoe.emulate.compile import HostCompileError, build
from jitmoe.emulate.mega_moe import Call, EmulatedLayer
from jitmoe.emulate.ranks import EmulatedRanks
from jitmoe.emulate.run import EmulationError
from jitmoe.jit.render import render
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import plans_of_model
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import is_gated
from jitmoe.reference_biases import Biases, random_biases

SEEDS = 4  # schedules a case is tried with
NO_KERNEL = "does not compile, which proves nothing: change the pattern"

# Statements that are taken away whole.
SYNCHRONISING = (
    r"sync_(?:block|warp|share|grid|named|math|notify)|fence_(?:async_shared|async_global|barrier_init)|"
    r"arrive(?:_expect_bytes|_after_copies)?|wait_(?:barrier|in_flight|until|for_\w+)|"
    r"end_(?:head|launch_number|sums)|publish_(?:mid|first|launch_number|pairs)|free_task|wgmma_(?:fence|commit|wait)|fence_gpu|"
    r"start_next_launch|clear_other_bank|drop_preloaded|fetch_add_shared|store_\w+_gpu|"
    r"signal_ranks|commit_stores|add_starts|end_transfer|"
    r"tell_ranks(?:_when_all)?|leave_if_aborted|stage_tokens|init_sums|finish_expert_tile|store_\w+_sys|"
    r"put|flush|add_tail|enter_rail|tell_tails|add_release_sys|or_release_sys|note_\w+|store_row_scales"
)
_NESTED = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
REPLACEMENTS = (
    (r"load_acquire_gpu\(", "load_relaxed_gpu("),
    (r"load_relaxed_gpu\(", "*("),
    (rf"load_acquire_sys\(({_NESTED})\)", r"emu::load(\1, emu::kRelaxed, emu::kSys)"),
    (r"add_release_sys\(([^;]*)\);", r"emu::fetch_add(\1, emu::kRelaxed, emu::kSys);"),
    (r"or_release_sys\(([^;]*)\);", r"emu::fetch_or(\1, emu::kRelaxed, emu::kSys);"),
    (r"store_release_sys\(", "store_relaxed_sys("),
    (r"store_release_sys\(", "store_release_gpu("),
    (r"store_release_gpu\(", "store_relaxed_gpu("),
    (r"add_release_gpu\(", "fetch_add_relaxed_gpu("),
    (r"fetch_add_acq_rel_gpu\(", "fetch_add_relaxed_gpu("),
    (r"arrive_expect_bytes\((\w+), [^;]*\);", r"arrive(\1);"),
    (r"wgmma_wait<0>", "wgmma_wait<1>"),
    (r"wgmma_wait<1>", "wgmma_wait<2>"),
    (r"\.parity\(\)", ".empty_parity()"),
    (r"\.empty_parity\(\)", ".parity()"),
    (r"wait_for_copy_groups<kCopiesAhead>", "wait_for_copy_groups<kCopiesAhead + 1>"),
    (r"swizzle_128\(([\w.]+), ([^()]*)\)", r"(\1 * 128 + (\2) * 16)"),
    (r" \^ (?:swizzle|at|i \* 16|row / 2 % 4)\b", ""),
    (r"\bm == 0 \?", "true ?"),
    (r"\bhalf == 0 \?", "true ?"),
    (r"0x6420\b", "0x7531"),
    (r"0x5410\b", "0x7632"),
    (r"0x5140\b", "0x7362"),
    (r"0x7362\b", "0x5140"),
    (r"\s\|\s+\(permute_bytes\(even, codes, \w+\) & kSigns\)", ""),
    (r"parity \^ 1", "parity"),
    (r"\) wanted = slot;", ") wanted = wanted;"),
    (r"is_stale \|=", "is_stale ="),
    (r"kUpFirst \? second : first", "second"),
    (r"p\.(?:ids_are_i64|weights_are_bf16) \?", "true ?"),
    (r"!kPresum \|\| __popc\(used\) == 1", "true"),
    (r"if \(num_stored > 1\) finish", "if (num_stored > 0) finish"),
    (r"warps \* tiles", "warps"),
    (r"warps \* tiles", "tiles"),
    (r"experts\[1\](?=, 1)", "experts[0]"),
    (r"__ffs\(used\) - 1", "0"),
    (r"min_of\(low - p\.first_expert", "min_of(low"),
    (r"slot < lane &&", "true &&"),
    (r"before != kUnused &&", "true &&"),
    (r"rank < kNumRanks && !is_set", "rank < 2 && !is_set"),
    (r"rest\[t\] &= rest\[t\] - 1", "rest[t] = 0"),
    (r"launch_number\(\) \+ 1(?=\);)", "launch_number() + 2"),
    (r"kWeightOnInput \?", "true ?"),
    (r"is_mine \?", "true ?"),
    (r"&& take_first_task\([^()]*\)", "&& true"),
    (r"k \* \(part \+ 1\) / parts", "k"),
    # Between ranks, rows alone.
    (r"wait_for_stores<", "wait_for_stores_read<"),
    (r"wait_for_stores_read<0>", "wait_for_stores_read<1>"),
    (r"rank < p\.rank \?", "true ?"),
    (r"left &= left - 1", "left = 0"),
    (r"used &= used - 1", "used = 0"),
    (r"ceil_div\(totals\[e\], kAlignment\) \* kAlignment", "totals[e]"),
    (r"is_there \?", "true ?"),
    (r"(?<=stores = )kExpertRows \?", "true ?"),
    (r" && leader == lane", ""),
    (r"used && before == 0", "used"),
    (r"used && (?=__ffs)", ""),
    (r"block \+ 1 == num_blocks\(\) &&", "true &&"),
    (r"block_idx\(\) == 0 &&(?= (?:warp|thread)_idx)", "true &&"),
    (r"rank == p\.rank && block_idx\(\) == 0", "rank == p.rank"),
    (r"rank == p\.rank && block_idx\(\) == 0", "block_idx() == 0"),
    (r"!p\.is_cached", "true"),
    (r"lane_idx\(\) >= distance \?", "true ?"),
    (r"p\.(?:x_is_bf16|is_weighted) \?", "true ?"),
    (r"quantizes_x\(p\) \|\|", ""),
    (r"of_step < kTokens &&", "true &&"),
    (r"token < chunk\.end", "true"),
    (r"id < kNumAllExperts \?", "true ?"),
    (r"(?<=at )\+ i \* 512 < kRowOutBytes", "< kRowOutBytes"),
    (r"tokens \+ 1\)", "tokens)"),
    (r"mask < 8;", "mask < 4;"),
    (r"kQuantizes && p\.x_is_bf16", "kQuantizes"),
    # Between nodes.
    (r"(?<=if \()numbers &&", "true &&"),
    (r"from > to \? from - 1 : from", "from"),
    (r"is_own \?", "true ?"),
    (r"node == own_node\(p\) \?", "true ?"),
    (r"node [!=]= own_node\(p\)(?=\)| &&)", "false"),
    (r"i < kDomainRanks", "i < 1"),
    (r" && has_room", ""),
    (r"missing == 0", "true"),
    (r"seen >> kEndShift == 0", "u32(seen) == 0"),
    (r"\(first \+ num\)(?= \* p\.channel_tokens)", "first"),
    (r"all_tell\(p, kWaitCounts, p\.counts_ready_at\) &&", "true &&"),
    (r"&& ranks_tell\([^()]*\)", "&& true"),
    (r"\(ended & [^;]*\) == 0", "true"),
    (r"place\.x != kNoPlace && node_of", "node_of"),
    (r"kExpertRows \? is_here :", "true ? is_here :"),
)
# Terms of addresses and coordinates; each becomes 0.
TERMS = (
    r"descriptor_step\([^()]*\)",
    r"\bk \* k(?:Block|Weight|Token)KBytes",
    r"k \* part / parts",
    r"\btask\.k_begin\b",
    r"u64\(tile \* parts\)",
    r"task\.phase \* kMaxBlocks",
    r"(?<=kMaxBlocks \+ )tile\b",
    r"block \* p\.first_stride",
    r"(?<=kBankFirst \+ )block\b",
    r"num_blocks\(\)(?= \+ fetch_add)",
    r"u64\(k\) \* [\w.]+",
    r"task\.tile \* (?:\([^()]*\)|\w+)",
    r"u64\(task\.tile\) \* [\w.]+",
    r"u64\(task\.row_start\) \* kMidStride",
    r"task\.row_start \+ i\b",
    r"share\.first_row \* kBlockKBytes",
    r"\(kBlockTokens - group \* kWarpgroupTokens\)",
    r"group \* (?:\([^()]*\)|descriptor_step\(kBlockRows / 2 \* kBlockKBytes\))",
    r"(?<!u32 )kBlockTokens(?= \+ lane_idx)",
    r"\b(?:same_|extra_)?share\.first_token(?: \* kBlockKBytes)?(?=[;,) +])",
    r"\bm \* (?:64|32|descriptor_step\(64 \* kBlockKBytes\))",
    r"lane \* 16\b",
    r"share\.warp \* (?:8|16)",
    r"\blane / (?:4|8|16) \* 8|\blane / 16 \* 8",
    r"row \* Copies::kRowsApart \* kBlockKBytes",
    r"piece \* kOrderedBytes",
    r"in_row / kBlockKBytes \* \([^()]*\)",
    r"channel / 32 \* (?:32|64)",
    r"channel % 32 / 2",
    r"task\.expert \* \([^()]*\)",
    r"u64\(tile\) \* \([^()]*\)",
    r"(?<=\) \+ )k(?=\) \* kBlockRows)",
    r"stage \* kWeightTileBytes",
    r"half \* 8\b",
    r"warp_idx\(\) % 4(?: \* 16)?",
    r"lane_idx\(\) (?:/ 4|% 4 \* 4)",
    r"first_row / 32",
    r"\bwarp \* 8\b",
    r"\b8 \* c\b",
    r"\(first \+ \w\) (?:/|%) \w+(?: \* (?:kHalfTile|64))?",
    r"(?:c|mine)\.(?:place|chunk) \* \d+",
    r"(?<=c\.row \+ )i \* 8",
    r"\bi \* \(8 \* kBlockKBytes\)",
    r"rows \* \(kRowsALane \* 2\)",
    r"(?:c\.)?row / 64 \* 8",
    r"(?:c\.)?row % 8",
    r"pair \* 4",
    r"first / 2\b",
    r"\(?first(?: \+ i\))? \* \(8 \* k(?:Weight|Block)KBytes\)",
    r"i % 2 \* 16",
    r"\(warp_idx\(\) - kExpandWarpBegin\) \* 64",
    r"u64\(ahead\[i\]\) \* 16",
    r"chunk \* 16",
    r"u64\(i\) \* kHidden",
    r"u64\(tokens\[t\]\) \* kTopK",
    r"\(u64\(tokens\[t\]\) \* kTopK \+ first\)",
    r"i64\(tokens\[t\]\) \* p\.y_stride",
    r"number / kNumLists % 2",
    r"number % kNumLists",
    r"u64\(token\) \* (?:kTopK \* kHidden|kNumTiles2|\(kHidden \* kElementBytes\))",
    r"channel \* kElementBytes",
    r"u64\(row\) \* kHidden",
    r"i64\(token\) \* p\.(?:x|y)_stride",
    # Between ranks.
    r"(?<=\+ )bank_start\([^()]*\)",
    r"u64\(launch_number\(\) % 2\)",
    r"p\.rank \* (?:4|num_pairs|kNumExperts|p\.rank_tokens)",
    r"token [/%] p\.rank_tokens",
    r"(?<= \+ )slot(?=\) \* kHidden)",
    r"u64\(token(?: % p\.rank_tokens)?\) \* (?:kTopK|kRowBytes|kXQuantScaleStride)",
    r"u64\(pair\) \* kHidden",
    r"u32\(unit % kUnits\) \* 512",
    r"row \* kHidden",
    r"(?<=start \+ )pair",
    r"\bi \* 512",
    r"tile \* kBlockRows",
    r"\b2 \* w\b",
    # Between ranks, rows alone.
    r"u64\(n\) \* kRecordWords",
    r"u64\(row\) \* (?:kRowBytes|kNumGroups)",
    r"u64\(token\) \* kMaxParts",
    r"(?<=kMaxParts \+ )part",
    r"rank << kPlaceBits",
    r"(?<=kPlaceBits \| )n\b",
    r"(?<=kTopK \+ )lane_idx\(\)",
    r"(?<![.\w])rank \* kNum(?:Columns|Experts)",
    r"(?<=share \* )block_idx\(\)",
    r"(?<=words\[)2 \* i",
    r"(?<=pair\) - )p\.first_expert",
    r"u64\((?:block|other)\) \* kNumColumns",
    r"lane % kTopK",
    r"of_step \* kNumRanks",
    r"(?<=first \+ )of_step",
    r"(?<=kNumAllExperts \+ )(?:p\.)?rank",
    r"(?<=min_of\()lane_idx\(\)(?= \* kPart)",
    r"lane_idx\(\) \* 16",
    r"u64\(chunk\.begin\) \* kTopK",
    r"(?<=chunk\.begin \+ )warp",
    r"channel (?:\* 2|/ 128)",
    r"(?<=group = )i \* kWarpThreads",
    r"i64\(token\) \* p\.(?:x_scale_token|bias_\d)_stride",
    r"i64\(group\) \* p\.x_scale_group_stride",
    r"sent\.source << kRecordPartBits",
    r"(?<=kRecordPartBits \| )part",
    r"home >> kRecordPartBits",
    r"(?<=kRecordIds \+ )(?:lane_idx\(\)|slot)",
    r"(?<=kRecordWeights \+ )(?:lane_idx\(\)|slot)",
    r"(?<=kRecordRows \+ )(?:lane_idx\(\)|slot)",
    r"i64\(n\) \* p\.rows_stride",
    r"i64\(__shfl_sync\(kFullMask, row, s\)\) \* p\.rows_stride",
    r"u64\(block_idx\(\)\) \* kNumThreads",
    r"u32\(unit % kPieces\) \* kPieceBytes",
    r"u64\(warp_idx\(\)\) \* num_blocks\(\)",
    r"(?<=num_blocks\(\) \+ )block_idx\(\)",
    # Between nodes.
    r"own_node\(p\) \* (?:8|kNodeRanks)",
    r"(?<![.\w])node \* kNodeRanks",
    r"(?:p\.rank|source) % kNodeRanks",
    r"first_of_domain\(p\)(?= \+)",
    r"i64\(from\) \* kMaxChannels",
    r"(?<=kMaxChannels \+ )channel",
    r"i64\(rank\) \* kCountWords",
    r"i64\(token\) \* kM(?:essageBytes|axParts)",
    r"[iu]64\(node\) \* p\.rank_(?:capacity|tokens)",
    r"(?<=kMaxNodeParts \+ )part",
    r"(?<=p\.rank_capacity \+ )(?:slot|token)",
    r"(?<=kMessagePlaces \+ )2 \* lane(?:_idx\(\))?",
    r"(?<=kMessage(?:Experts|Weights) \+ )lane(?:_idx\(\))?",
    r"(?<=first_slot \+ )(?:i|taken)\b",
    r"i / kNumRanks \* kBatchRows",
    r"\btoken(?= \| \()",
    r"entry\[0\] >> kTokenBits",
    rf"(?<=: )__popc\(nodes & {_NESTED}\)",
    r"(?<=num_sent - )num_told",
    r"u64\(is_end\) << kEndShift",
    r"(?<=block_idx\(\) \* kBlockChannels \+ )(?:warp\b|warp_idx\(\) - \w+)",
    r"block_idx\(\) \* kBlockChannels",
    r"channel \* p\.channel_tokens",
)
# The start of such a statement; definitions and expressions are something else.
_STATEMENT = rf"[;{{}})]\s*((?:{SYNCHRONISING})(?:<\w+>)?\()"
_ROOM = re.compile(r"^DEVICE void init_barriers|^extern \"C\" __global__", re.MULTILINE)

# Mutants that do the same as the original, by name: why.
EQUIVALENT = {
    "roles/math.cuh: without wait_for_stage(p, smem, ring); #2": "is in traced kernels only, and "
    "the loop behind it waits for the same stage",
    "roles/bank.cuh: without start_next_launch();": "the next launch starts when this one has "
    "ended: only later",
    "roles/schedule.cuh: without wait_barrier(p, kWaitTaskWanted, &smem.task_wanted[wanted.stage], "
    "wanted.stage, wanted.parity());": "tasks are claimed as soon as a slot is free: only earlier",
    "roles/schedule.cuh: without wait_for_mid(p, head, task.block);": "a CTA may have two of few "
    "tasks where others have none: only later",
    "roles/schedule.cuh: ) wanted = slot; -> ) wanted = wanted;": "two are claimed ahead, whatever "
    "their length: only earlier",
    "roles/schedule.cuh: task.k_begin -> 0 #2": "fewer parts are taken for short: only later",
    "roles/schedule.cuh: k * (part + 1) / parts -> k": "the first part is the whole tile then, "
    "which finishes it, and the others' sums are never joined",
    "roles/load.cuh: without wait_for_room(p, smem, second);": "the second of a pair waits for its "
    "stage itself: only earlier",
    "roles/load.cuh: task.k_begin -> 0 #4": "another k-block begins the pairs of a part",
    "roles/feed.cuh: task.k_begin -> 0": "prefill has no parts: it is 0",
    "roles/expand.cuh: task.k_begin -> 0": "the same",
    "roles/bias.cuh: without sync_warp();": "only keeps the compiler from loading all ahead",
    "roles/channel_scales.cuh: without sync_warp(); #3": "the same",
    "roles/channel_scales.cuh: without sync_warp(); #4": "the same",
    "roles/many_ranks.cuh: load_relaxed_gpu( -> *(": "behind the flags of all ranks a "
    "plain load will do",
    "roles/combine_many_ranks.cuh: before != kUnused && -> true &&": "an unused slot's expert "
    "is of no rank",
    "roles/exchange.cuh: bank_start(p, 1, kRowBytes) -> 0": "a rank whose launch has ended has "
    "rows of all experts that its tokens go to, whose ranks have fetched the tokens before",
    "roles/exchange.cuh: bank_start(p, 1, kXQuantScaleStride) -> 0": "the same",
    "roles/routing.cuh: load_relaxed_gpu( -> *(": "behind the grid barrier a plain load will do",
    "roles/symmetric.cuh: load_acquire_gpu( -> load_relaxed_gpu(": "the launch's parity has been "
    "acquired before, which orders the same",
    "roles/symmetric.cuh: store_release_gpu( -> store_relaxed_gpu(": "the parity has been released "
    "before, which orders the same",
    "roles/transfer.cuh: load_acquire_gpu( -> load_relaxed_gpu(": "the launch before is over, and "
    "its number, stored last, is acquired next",
    "roles/notify.cuh: block_idx() == 0 && -> true &&": "the launch before is over for all "
    "blocks, which set the same flags",
    "roles/reduce.cuh: block_idx() == 0 && -> true &&": "the same",
    "roles/dispatch.cuh: without sync_warp(); #2": "the loop over tokens has one before the next "
    "token's scales, too",
    "roles/forward.cuh: !p.is_cached -> true #2": "records go to handles in dispatches that are "
    "not cached, and nobody reads them later",
    "roles/tell_nodes.cuh: !p.is_cached -> true": "counts of the launch before go once more, and "
    "nobody reads them",
    "roles/tell_nodes.cuh: !p.is_cached -> true #2": "the same",
    "roles/channels.cuh: without sync_warp();": "the messages told of have one behind them, and "
    "sums on the own node are read by the warp itself, behind another",
    "roles/scale_out.cuh: without fence_async_global();": "who reads rows by TMA has one, too",
    "roles/scale_up.cuh: without fence_async_global();": "the same",
    "roles/forward_sums.cuh: without fence_async_global(); #2": "the same",
    "roles/scale_up_rows.cuh: without fence_barrier_init();": "the same thread's next barriers "
    "have one behind them",
    "roles/scale_up_rows.cuh: without sync_warp();": "lanes meet for the next row's target "
    "before, when all have seen the last one land",
}
# Mutants that no schedule so far has shown to be wrong: why.
UNSEEN = {
    "roles/bank.cuh: without fence_gpu();": "orders a store against the start of the next "
    "launch, which is no operation on memory: nothing is to be done in the emulator",
    "roles/first_task.cuh: is_mine ? -> true ?": "needs a block that starts after another has come "
    "to GEMM 2 and taken its task; one schedule of some tens had it, as a race on mid",
    "roles/symmetric.cuh: load_relaxed_gpu( -> *(": "is written where a wait has run out of time, "
    "which no case has",
    "roles/math.cuh: without sync_warp(); #3": "what writes there next are instructions of the "
    "whole warp, at which its lanes meet before",
    "roles/notify.cuh: without sync_warp();": "lanes may come to a named barrier one by one in the "
    "emulator, on a GPU they may not",
    "roles/notify.cuh: store_release_sys( -> store_relaxed_sys(": "orders what the host reads, "
    "which is not emulated",
    "roles/notify.cuh: store_release_sys( -> store_release_gpu(": "the same",
    "roles/first_task.cuh: && take_first_task(p, head, block) -> && true": "the same",
    "roles/end_dispatch.cuh: load_relaxed_gpu( -> *(": "is of a wait that has run out of time",
    "roles/arrivals.cuh: first_of_domain(p) -> 0": "is what such a wait names: see "
    "tests/cpu/test_emulate_hybrid_faults.py",
    "roles/tell_nodes.cuh: all_tell(p, kWaitCounts, p.counts_ready_at) && -> true &&": "the same",
    "roles/end_dispatch.cuh: without wait_for_own_rows(p);": "the same",
    "roles/forward.cuh: !p.is_cached -> true": "needs another number of blocks than that of the "
    "handle's dispatch: see tests/cpu/test_emulate_hybrid.py",
    "roles/forward.cuh: !p.is_cached -> true #3": "the same",
    "roles/forward.cuh: place.x != kNoPlace && node_of -> node_of": "needs 64 ranks: an unused "
    "slot looks like one of rank 63",
    "roles/scale_out.cuh: place.x != kNoPlace && node_of -> node_of": "the same",
}


@dataclass(frozen=True)
class Mutant:
    """`text` at `start` of a file, on line `line`, becomes `replacement`.

    `number` counts the places in the file where it could.
    """

    file: str
    line: int
    start: int
    text: str
    replacement: str
    number: int

    @property
    def name(self) -> str:
        """Says what and where, but not by line: other changes leave it alone."""
        text = " ".join(self.text.split())
        change = f"without {text}" if self.replacement == ";" else f"{text} -> {self.replacement}"
        return f"{self.file}: {change}" + (f" #{self.number}" if self.number > 1 else "")


@dataclass(frozen=True)
class Case:
    """A kernel and the launches that it is tried with: numbers of tokens, of many ranks of each,
    one after another.

    overlap      they are launches of one stream, and inputs of some arrive late
    small_parts  tiles come in parts of one k-block, so that small layers have some
    schedules    for each that the others have: what is quick can have many
    """

    plan: MegaMoePlan
    token_counts: tuple[int | tuple[int, ...], ...]
    routing: str
    num_blocks: int = 2
    overlap: bool = False
    small_parts: bool = False
    schedules: int = 1


AnyCase = Case | TransferCase


def _case(bucket: str, sizes: tuple[int, ...], tokens, routing="unused", **changes) -> Case:
    names = ("num_blocks", "overlap", "small_parts", "schedules")
    options = {name: changes.pop(name) for name in names if name in changes}
    activation = changes.pop("activation", "swiglu")
    format, gated = changes.pop("format", "fp8_block"), is_gated(activation)
    problem = MoeProblem(1, *sizes, format, gated)
    plan = plans_of_model(problem, GPUS["h200"], activation=activation)[bucket]
    fields = {"num_stages": 3} | changes
    return Case(dataclasses.replace(plan, **fields), tokens, routing, **options)


# More than 384 pairs to sort locally, so that a warp takes several times 32; more than 32 experts,
# so that several warps and several lanes share the work on them; k-blocks for the unrolled loop and
# a remainder; more pairs than a block of a prefill launch sorts at a time; ids that several lanes
# compare with those sorted early (more than 256); tiles of both GEMMs in parts, not all of one
# size; launches that sort locally behind others that sort together. No larger than that takes: a
# schedule of a case is a second or two. Those that find most come first.
CASES = (
    _case("decode", (256, 80, 33, 2), (100,), "hot_expert", num_local_pairs=2),
    _case("decode", (256, 208, 33, 2), (5, 1, 12), num_local_pairs=2, overlap=True),
    _case(
        *("decode", (512, 256, 8, 2), (5, 12, 3), "one_expert"),
        **{"num_blocks": 6, "overlap": True, "small_parts": True},
    ),
    _case("decode", (384, 48, 8, 4), (3, 68, 6), num_blocks=3, overlap=True),
    _case("prefill", (640, 256, 3, 2), (5, 20, 9), overlap=True),
    _case("decode", (384, 80, 33, 3), (130, 3)),
    _case("prefill", (256, 208, 2, 2), (140, 133, 30), "hot_expert"),
    _case("prefill", (128, 48, 33, 32), (140,), "hot_expert", num_blocks=1),
    _case(
        *("decode", (512, 208, 8, 2), (5, 12), "one_expert"),
        **{"num_blocks": 6, "overlap": True, "small_parts": True, "has_bias": True},
    ),
    # Rows of bf16 that end inside a k-block; tiles that take tokens of their expert along.
    _case("decode", (144, 208, 3, 2), (5, 40, 12), overlap=True, format="bf16"),
    _case("prefill", (272, 144, 2, 2), (140, 133, 30), "hot_expert", format="bf16"),
    # Without a gate a tile has two groups of channels, the last but one.
    _case("decode", (256, 272, 8, 2), (5, 40, 12), "one_expert", activation="relu2_no_gate"),
    _case("prefill", (256, 272, 2, 2), (140, 30), "hot_expert", activation="relu2_no_gate"),
    # MXFP4 beside tokens in e4m3 and bf16: tiles of all widths, whole and in parts of fewer
    # k-blocks than copies are under way, rows of weights and tokens that end inside a k-block,
    # tokens put in order by each block and by all together.
    _case(
        *("decode", (384, 96, 4, 2), (70, 5, 20), "hot_expert"),
        **{"num_local_pairs": 64, "overlap": True, "format": "mxfp4_fp8"},
    ),
    _case(
        *("decode", (352, 160, 3, 2), (5, 40, 12), "hot_expert"),
        **{"num_local_pairs": 64, "overlap": True, "format": "mxfp4_bf16"},
    ),
    _case(
        *("decode", (512, 256, 4, 2), (20, 3), "one_expert"),
        **{"num_blocks": 6, "small_parts": True, "num_stages": 5, "format": "mxfp4_fp8"},
    ),
    # Expanded in shared memory: tiles of both kinds, between rings as short as they may be.
    _case(
        *("prefill", (384, 96, 2, 2), (140, 30), "hot_expert"),
        **{"num_stages": 2, "num_packed_stages": 2, "format": "mxfp4_fp8"},
    ),
    _case(
        *("prefill", (352, 96, 2, 2), (140, 30), "hot_expert"),
        **{"num_stages": 2, "num_packed_stages": 2, "format": "mxfp4_bf16"},
    ),
    # A block that comes to its first task when others have taken it as an orphan.
    _case("decode", (128, 48, 8, 2), (2, 2, 3), num_blocks=4, overlap=True, schedules=2),
    _case("decode", (384, 80, 4, 2), (70, 5), format="fp8_channel"),
    _case("prefill", (256, 144, 2, 2), (120,), format="fp8_channel"),
    # Ranks that drift apart, sort locally and together, send sums and rows.
    _case(
        *("decode", (256, 80, 3, 3), ((5, 0, 9), (2, 7, 1), (0, 3, 4))),
        **{"num_ranks": 3, "presum": True},
    ),
    _case(
        *("prefill", (640, 80, 3, 3), ((5, 0, 40), (70, 2, 1), (1, 30, 9))),
        **{"num_ranks": 3, "presum": True},
    ),
    _case(
        *("decode", (256, 80, 3, 3), ((5, 0, 9), (2, 7, 1), (9, 3, 4)), "duplicates"),
        **{"num_ranks": 3, "num_local_pairs": 20, "presum": False},
    ),
    _case(
        *("prefill", (256, 80, 2, 3), ((5, 0, 40), (70, 2, 1)), "duplicates"),
        **{"num_ranks": 3, "presum": False},
    ),
    _case(
        *("decode", (288, 80, 2, 2), ((5, 0, 9), (2, 7, 1))),
        **{"num_ranks": 3, "presum": True, "format": "bf16"},
    ),
    # More groups of channels than lanes.
    _case("decode", (4224, 48, 2, 2), ((3, 0), (1, 2)), num_ranks=2, presum=True, num_blocks=1),
    # A warp that has fallen behind by a whole grid barrier.
    _case("decode", (128, 48, 100, 2), (8,), num_local_pairs=2, num_blocks=3, schedules=4),
    *transfer_mutations.CASES,
)


def files_of(case: AnyCase) -> Iterator[tuple[str, int, str]]:
    """(path, position, body) of every mutable file in the text of a case."""
    text = rendered(case)
    begin = _ROOM.search(text).start()
    banners = list(re.finditer(r"^// ==== (.+) ====\n", text, re.MULTILINE))
    for banner, after in zip(banners, [*banners[1:], None], strict=True):
        end = after.start() if after else begin
        if banner[1].startswith("roles/"):
            yield banner[1], banner.end(), text[banner.end() : end]
    yield f"{case.plan.name}.cu.jinja", begin, text[begin:]


def mutants_of(file: str, body: str) -> Iterator[Mutant]:
    """Every mutant of one file."""
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), body)
    seen = Counter()

    def mutant(begin: int, end: int, replacement: str) -> Mutant:
        what = body[begin:end]
        seen[what, replacement] += 1
        line = body.count("\n", 0, begin) + 1
        return Mutant(file, line, begin, what, replacement, seen[what, replacement])

    for match in re.finditer(_STATEMENT, code):
        end = _end_of_call(code, match.end())
        if code[end] == ";":
            yield mutant(match.start(1), end + 1, ";")
    for pattern, replacement in (*REPLACEMENTS, *((term, "0") for term in TERMS)):
        for match in re.finditer(pattern, code):
            yield mutant(*match.span(), match.expand(replacement))


def _end_of_call(code: str, at: int) -> int:
    """Behind the parenthesis that closes the one open at `at`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        at += 1
    return at


@cache
def rendered(case: AnyCase) -> str:
    text = render(case.plan, layer="emulated")
    if isinstance(case, Case) and case.small_parts:
        text = with_small_parts(text)
    return text


def all_mutants(cases: Sequence[AnyCase] = CASES) -> list[Mutant]:
    """Those of all cases' texts, each once."""
    found = {}
    for case in cases:
        for file, _, body in files_of(case):
            for mutant in mutants_of(file, body):
                found[mutant] = None
    return list(found)


@cache
def layer_of(case: Case) -> reference.Layer:
    plan = case.plan
    sizes = plan.num_ranks * plan.num_experts, plan.hidden, plan.intermediate
    kind = {"format": plan.format, "gated": is_gated(plan.activation)}
    layer = reference.random_layer(*sizes, seed=0, **kind)
    if plan.format != "fp8_channel":
        return layer
    # Channels apart from each other: a wrong scale shows.
    rng = np.random.default_rng(0)
    apart = [s * rng.uniform(0.5, 2, s.shape).astype(np.float32) for s in (layer[1], layer[3])]
    return layer._replace(w13_scale=apart[0], w2_scale=apart[1])


@cache
def biases_of(case: Case) -> Biases | None:
    plan = case.plan
    if not plan.has_bias:
        return None
    return random_biases(plan.num_experts, plan.hidden, plan.intermediate, seed=1)


@cache
def launch_of(case: Case, counts: int | tuple[int, ...]) -> tuple[reference.Tokens, np.ndarray]:
    """Inputs of a launch, of all ranks together, and the oracle's result."""
    plan, num_tokens = case.plan, int(np.sum(counts))
    sizes = plan.hidden, plan.num_ranks * plan.num_experts, plan.top_k
    tokens = reference.random_tokens(num_tokens, *sizes, num_tokens, case.routing)
    x, scale = fp8.quantize_tokens(tokens.x) if plan.quantizes else (tokens.x, None)
    inputs = (x, scale, tokens.topk_ids, tokens.topk_weights, *layer_of(case))
    w13_bias, w2_bias = biases_of(case) or (None, None)
    biases = {"w13_bias": w13_bias, "w2_bias": w2_bias}
    options = {"requantize": True, "format": plan.format, "activation": plan.activation}
    return tokens, reference.mega_moe(*inputs, **options, **biases)


def outputs(emulated: EmulatedLayer, case: Case, seed: int) -> Iterator[np.ndarray]:
    """y of every launch of the case, under the schedule of `seed`."""
    calls = []
    for number, num_tokens in enumerate(case.token_counts):
        tokens, _ = launch_of(case, num_tokens)
        is_bf16 = (number + seed) % 3 == 2 if case.overlap else seed % 2
        is_bf16 |= not case.plan.quantizes
        x = fp8.encode_bf16(tokens.x) if is_bf16 else fp8.quantize_tokens(tokens.x)
        ids = tokens.topk_ids.astype(np.int64 if (number + seed) % 2 else np.int32)
        calls.append(Call(x, ids, tokens.topk_weights))
    if not case.overlap:
        for call in calls:
            yield emulated(*call[:3], seed=seed, timeout_s=120)
        return
    rng = np.random.default_rng(seed)
    calls = [
        late_call(call, case.plan.num_experts, rng) if (number + seed // 2) % 2 else call
        for number, call in enumerate(calls)
    ]
    yield from emulated.run_in_stream(calls, seed=seed, timeout_s=120)


def rank_outputs(text: str, case: Case, seed: int) -> Iterator[np.ndarray]:
    """y of every launch on all ranks, which are held back now and then."""
    plan, each = case.plan, case.plan.num_experts
    layers = [
        reference.Layer(*(p if p is None else p[rank * each :][:each] for p in layer_of(case)))
        for rank in range(plan.num_ranks)
    ]
    room = max(map(max, case.token_counts))
    emulated = EmulatedRanks(plan, layers, room, num_blocks=case.num_blocks)
    emulated.ranks[0].executable = build(text, plan.name, checked=True)
    encode = fp8.quantize_tokens if seed % 2 and plan.quantizes else fp8.encode_bf16
    id_type = np.int32 if seed % 2 else np.int64
    rounds = []
    for counts in case.token_counts:
        x, ids, weights = launch_of(case, counts)[0]
        own = [slice(end - n, end) for n, end in zip(counts, np.cumsum(counts), strict=True)]
        rounds.append([Call(encode(x[i]), ids[i].astype(id_type), weights[i]) for i in own])
    for ys in emulated.run(rounds, seed=seed, delays=True, timeout_s=30):
        yield np.concatenate(ys)


def late_call(call: Call, num_experts: int, rng: np.random.Generator) -> Call:
    """Its inputs arrive late: before, one id is another, or all are, and the rest is NaN."""
    x, ids, weights = call[:3]
    parts = dict(zip(("x", "x_scale"), x if isinstance(x, tuple) else (x,), strict=False))
    late = parts | {"topk_ids": ids, "topk_weights": weights}
    early = {name: np.full_like(part.view(np.uint8), 0xFF) for name, part in late.items()}
    early = {name: part.view(late[name].dtype) for name, part in early.items()}
    if rng.integers(2):
        ids = rng.integers(-1, num_experts + 1, ids.shape).astype(ids.dtype)
    else:
        ids = ids.copy()
        ids.flat[rng.integers(ids.size)] = rng.integers(num_experts)
    x = tuple(early[name] for name in parts) if isinstance(x, tuple) else early["x"]
    return Call(x, ids, early["topk_weights"], late)


def run(case: AnyCase, text: str, seed: int) -> str | None:
    """How the kernel in `text` fails in this case, under one schedule: a line; None if it does
    not.
    """
    if isinstance(case, TransferCase):
        return case.run(text, seed)
    if case.plan.num_ranks > 1:
        ys = rank_outputs(text, case, seed)
    else:
        emulated = EmulatedLayer(
            case.plan,
            layer_of(case),
            max(case.token_counts),
            num_blocks=case.num_blocks,
            biases=biases_of(case),
        )
        emulated.executable = build(text, case.plan.name, checked=True)
        ys = outputs(emulated, case, seed)
    sums_twice = case.plan.num_ranks > 1 and case.plan.presum
    try:
        for counts, y in zip(case.token_counts, ys, strict=True):
            _, expected = launch_of(case, counts)
            error = reference.relative_error(y, expected)
            if (
                not error < (6e-3 if sums_twice else 4e-3)
                or reference.worst_element(y, expected) > 0.06
            ):
                return f"wrong result, relative error {error:.1e}"
    except EmulationError as error:
        return str(error).splitlines()[0]
    return None


def seeds_of(case: AnyCase, turn: int) -> range:
    """The schedules of the case in a turn through all cases."""
    return range(turn * case.schedules, (turn + 1) * case.schedules)


def mutated(mutant: Mutant, cases: Sequence[AnyCase]) -> Iterator[tuple[AnyCase, str]]:
    """The cases that have the mutant's file, each with its text, broken."""
    for case in cases:
        text = rendered(case)
        for file, position, _ in files_of(case):
            at = position + mutant.start
            end = at + len(mutant.text)
            if file == mutant.file and text[at:end] == mutant.text:
                yield case, text[:at] + mutant.replacement + text[end:]


def kill(mutant: Mutant, seeds: int = SEEDS, cases: Sequence[AnyCase] = CASES) -> str | None:
    """What killed the mutant; None if it survived every one of `cases` that has its file.

    Raises HostCompileError for one that does not compile: it would prove nothing.
    """
    broken = list(mutated(mutant, cases))
    for turn in range(seeds):
        for case, text in broken:
            for seed in seeds_of(case, turn):
                if verdict := run(case, text, seed):
                    return f"{verdict} [case {CASES.index(case)}, seed {seed}]"
    return None


def _verdict(mutant: Mutant, seeds: int, cases: Sequence[AnyCase]) -> str | None:
    """As of `kill`, or NO_KERNEL: one bad pattern does not end a run of an hour."""
    try:
        return kill(mutant, seeds, cases)
    except HostCompileError:
        return NO_KERNEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--kernel", help="in cases of the kernel of this name alone")
    parser.add_argument("--sample", type=int, help="so many of them, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="schedules a launch is tried with")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="name the mutants and stop")
    arguments = parser.parse_args()

    cases = [c for c in CASES if arguments.kernel in (None, c.plan.name)]
    mutants = [m for m in all_mutants(cases) if arguments.only in m.name]
    if arguments.sample is not None:
        mutants = random.Random(arguments.seed).sample(mutants, arguments.sample)
    if arguments.list:
        print("\n".join(f"{m.name}  ({m.line})" for m in mutants))
        return
    start = time.perf_counter()
    for case in cases:
        for seed in chain.from_iterable(seeds_of(case, turn) for turn in range(arguments.seeds)):
            failure = run(case, rendered(case), seed)
            assert failure is None, f"the original fails: {failure}"
    with ThreadPoolExecutor(arguments.jobs) as pool:
        verdicts = []
        results = pool.map(partial(_verdict, seeds=arguments.seeds, cases=cases), mutants)
        for mutant, verdict in zip(mutants, results, strict=True):
            verdicts.append(verdict)
            label = {None: "SURVIVED", NO_KERNEL: "INVALID "}.get(verdict, "killed  ")
            print(f"{label}  {mutant.name}  {verdict or ''}", flush=True)
    survivors = [m for m, verdict in zip(mutants, verdicts, strict=True) if verdict is None]
    equivalent = [m for m in survivors if m.name in EQUIVALENT]
    unexplained = [m for m in survivors if m.name not in EQUIVALENT | UNSEEN]
    killed = len(mutants) - len(survivors) - verdicts.count(NO_KERNEL)
    print(
        f"\n{killed} of {len(mutants)} killed, {len(equivalent)} equivalent: score "
        f"{killed / (len(mutants) - len(equivalent)):.1%} in {time.perf_counter() - start:.0f} s"
    )
    for mutant in survivors:
        print(f"  {mutant.name}: {(EQUIVALENT | UNSEEN).get(mutant.name, 'NOT EXPLAINED')}")
    sys.exit(len(unexplained) > 0 or NO_KERNEL in verdicts)


if __name__ == "__main__":
    main()
