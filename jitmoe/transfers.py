"""dispatch() and combine() behind their doors: check every rank's arguments, plan alike, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from jitmoe.dispatched import Dispatched, DispatchHandle, new_handle
from jitmoe.fused_ranks import by_rank, common_bound, implicit_workspace
from jitmoe.plan.dispatch import DispatchPlan
from jitmoe.plan.problem import MAX_TOKENS
from jitmoe.plan.transfer_pairs import combine_of, dispatch_plan
from jitmoe.run.driver import device_spec, is_capturing
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.ranks import differences
from jitmoe.run.streams import current_stream, stream_address
from jitmoe.run.symmetric import Group, LocalGroup
from jitmoe.run.workspace import CaptureError
from jitmoe.transfer_arguments import How, Tokens, read_rows, read_tokens
from jitmoe.transfer_launch import ready

# Regions of a handle that dispatch writes; between nodes those behind them too.
HANDLE = ("places", "own_records", "expert_counts", "expert_starts", "num_received")
NODES = ("forwarded", "source_starts")


def run_dispatch(group: Group, workspace, stream, how: How, x, topk_ids, topk_weights, handle):
    """See `unfused.dispatch`."""
    memory = _workspace(group, workspace)
    given = _by_rank(group, x=x, topk_ids=topk_ids, topk_weights=topk_weights, handle=handle)
    handles = [one[3] for one in given]
    is_cached = handles[0] is not None
    if any((own is not None) != is_cached for own in handles):
        raise ValueError("handle must be given for all ranks of a LocalGroup or for none")
    ranks = [read_tokens(group, *one[:3], is_cached) for one in given]
    family = ranks[0].x.family
    stream = _stream(stream, family, group.device)
    if is_cached:
        plan, bound = _plan_of_handles(group, handles, ranks, how)
    else:
        plan, bound = _plan(group, how, ranks)
        handles = [
            new_handle(group, plan, rank.num_tokens, bound, number, family, stream)
            for rank, number in zip(ranks, group.ranks, strict=True)
        ]
    if how.exact and not is_cached and is_capturing(stream):
        raise CaptureError(
            "exact=True waits on the host for the number of rows, which a graph capture forbids; "
            "take exact=False, whose arrays have room for all that can come"
        )
    launch = ready(memory, plan, bound, stream, how.num_sms)
    if not is_cached:
        handles = [replace(own, channel_tokens=launch.channel_tokens) for own in handles]
    for i, (rank, own) in enumerate(zip(ranks, handles, strict=True)):
        launch.write(
            i,
            rank.x.ptr,
            *(0 if array is None else array.ptr for array in rank[1:]),
            *(own.address(name) for name in HANDLE),
            memory.host_counts[i].clear() if how.exact and not is_cached else 0,
            *launch.memory(i, "block_counts", "header", "banks"),
            *rank.strides,
            *launch.of_rank(i),
            rank.num_tokens,
            rank.scale is None,
            rank.ids is not None and rank.ids.dtype == "i64",
            rank.weights is not None and rank.weights.dtype != "f32",
            how.first_expert,
            is_cached,
            *_of_nodes(own),
        )
    launch.run(stream)
    if how.exact and not is_cached:
        counts = [own.wait(memory.check) for own in memory.host_counts]
        handles = [replace(own, received=n) for own, n in zip(handles, counts, strict=True)]
    found = [Dispatched(*of) for of in zip(handles, launch.row_addresses, strict=True)]
    return found if isinstance(group, LocalGroup) else found[0]


def run_combine(group: Group, workspace, stream, num_sms, y, handle, bias, weighted, out):
    """See `unfused.combine`."""
    memory = _workspace(group, workspace)
    given = _by_rank(group, y=y, handle=handle, bias=bias, out=out)
    _check_handles(group, [own for _, own, *_ in given])
    ranks = [read_rows(group, own, rows, *rest) for rows, own, *rest in given]
    first = given[0][1]
    stream = _stream(stream, ranks[0][0].family, group.device)
    launch = ready(memory, combine_of(first.plan), first.max_num_tokens, stream, num_sms)
    for i, ((rows, biases, target, _), (_, own, *_)) in enumerate(zip(ranks, given, strict=True)):
        both = [*biases, None, None][:2]
        launch.write(
            i,
            rows.ptr,
            *(own.address(name) for name in ("places", "own_records", "num_received")),
            *(0 if bias is None else bias.ptr for bias in both),
            target.ptr,
            *launch.memory(i, "header", "banks"),
            2 * rows.strides[0],
            *(0 if bias is None else 2 * bias.strides[0] for bias in both),
            2 * target.strides[0],
            *launch.of_rank(i, own.channel_tokens),
            own.num_tokens,
            weighted,
            *_of_nodes(own),
        )
    launch.run(stream)
    outs = [rank[3] for rank in ranks]
    return outs if isinstance(group, LocalGroup) else outs[0]


def _workspace(group: Group, workspace: GroupWorkspace | None) -> GroupWorkspace:
    if group.num_ranks == 1:
        raise ValueError(
            "group has one rank, which keeps its tokens; sort them by expert instead, or call "
            "mega_moe"
        )
    memory = workspace or implicit_workspace(group)
    if not isinstance(memory, GroupWorkspace) or memory.group is not group:
        raise ValueError("workspace must be a GroupWorkspace of the group, or left out")
    memory.check()
    return memory


def _of_nodes(handle: DispatchHandle) -> list[int]:
    """Addresses of what a handle has between nodes."""
    return [handle.address(name) for name in NODES if name in handle.regions.offsets]


def _by_rank(group: Group, **given) -> list[tuple]:
    """The arguments of each rank that this process drives."""
    is_local = isinstance(group, LocalGroup)
    optional = ("topk_ids", "topk_weights", "handle", "bias", "out")
    return list(by_rank(group, given, optional) if is_local else [tuple(given.values())])


def _stream(stream, family: str, device: int) -> int:
    return current_stream(family, device) if stream is None else stream_address(stream)


def _plan(group: Group, how: How, ranks: Sequence[Tokens]) -> tuple[DispatchPlan, int]:
    """The same on all ranks, and the tokens that each may have."""
    if how.layout not in (None, "tokens", "experts"):
        raise ValueError(f'layout must be "tokens" or "experts", got {how.layout!r}')
    if how.layout != "experts" and how.alignment is not None:
        raise ValueError('alignment is of layout "experts"; leave it out, or take that layout')
    if how.num_experts is None or how.num_experts % group.num_ranks:
        raise ValueError(
            f"num_experts must be given and a multiple of the {group.num_ranks} ranks, got "
            f"{how.num_experts}; pass the experts of all ranks"
        )
    kinds = [
        {
            "hidden": rank.x.shape[1],
            "top_k": rank.ids.shape[1],
            "dtype": rank.x.dtype,
            "scales": rank.scale is not None,
        }
        for rank in ranks
    ]
    if found := differences(kinds):
        raise ValueError(f"ranks must have tokens of the same kind: {', '.join(found)}")
    first = kinds[0]
    given = "fp8" if first["scales"] else "bf16"
    if how.format == "bf16" and given == "fp8":
        raise ValueError('x is e4m3, which stays so: take format="fp8", or pass x in bf16')
    plan = _checked_plan(
        group.device,
        first["hidden"],
        how.num_experts // group.num_ranks,
        first["top_k"],
        group.num_ranks,
        how.format or given,
        how.layout == "experts",
        1 if how.layout != "experts" else 128 if how.alignment is None else how.alignment,
        len(group.ranks),
        group.num_nodes,
        group.rail,
    )
    bound = common_bound(group, [rank.num_tokens for rank in ranks], how.max_num_tokens)
    if bound > MAX_TOKENS:
        raise ValueError(
            f"a rank may have up to {MAX_TOKENS:,} tokens, got {bound:,}; split the batch"
        )
    return plan, bound


@cache
def _checked_plan(device: int, *fields) -> DispatchPlan:
    gpu = device_spec(device)
    *shape, num_nodes, rail = fields
    plan = dispatch_plan(gpu.arch, *shape, num_nodes=num_nodes, rail=rail)
    plan.check(gpu)
    combine_of(plan).check(gpu)
    return plan


def _check_handles(group: Group, handles: Sequence[DispatchHandle]) -> None:
    """One handle of each rank here, of the same dispatch."""
    for number, handle in zip(group.ranks, handles, strict=True):
        if not isinstance(handle, DispatchHandle):
            raise TypeError(
                f"handle must be the DispatchHandle of a dispatch, got {type(handle).__name__}; "
                "pass Dispatched.handle"
            )
        if handle.group is not group:
            raise ValueError("the handle is of another group's dispatch; pass that group")
        if handle.rank != number:
            raise ValueError(
                f"the handle is of rank {handle.rank}, this is rank {number}; pass each its own"
            )
    plans = {(handle.plan, handle.max_num_tokens) for handle in handles}
    if len(plans) > 1:
        raise ValueError("handles are of different dispatches; pass those of one")


def _plan_of_handles(
    group: Group, handles: Sequence[DispatchHandle], ranks: Sequence[Tokens], how: How
) -> tuple[DispatchPlan, int]:
    _check_handles(group, handles)
    plan = handles[0].plan
    same = {
        "num_experts": plan.num_all_experts,
        "layout": "experts" if plan.expert_rows else "tokens",
        "alignment": plan.alignment if plan.expert_rows else None,
        "format": plan.format,
        "max_num_tokens": handles[0].max_num_tokens,
    }
    for name, value in same.items():
        given = getattr(how, name)
        if given not in (None, value):
            raise ValueError(
                f"{name} is {value!r} as at the handle's dispatch, got {given!r}; leave it out"
            )
    if how.exact and handles[0].received is None:
        raise ValueError(
            "the handle's dispatch was not exact, so the host knows no numbers; leave exact out, "
            "or take it there"
        )
    for rank, handle in zip(ranks, handles, strict=True):
        if rank.x.shape != (handle.num_tokens, plan.hidden):
            raise ValueError(
                f"x must have shape [{handle.num_tokens}, {plan.hidden}], as at the handle's "
                f"dispatch, got {list(rank.x.shape)}"
            )
        if plan.format == "bf16" and rank.scale is not None:
            raise ValueError("x is e4m3 and the handle's dispatch sent bf16; pass x in bf16")
    return plan, handles[0].max_num_tokens
