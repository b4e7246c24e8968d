"""mega_moe() on many ranks: check every rank's arguments, plan alike, launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jitmoe.arguments import Fit, read_call, read_expert_map, split_x
from jitmoe.jit.render import plan_hash
from jitmoe.plan import heuristics
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.mega_moe_params import SYMMETRIC
from jitmoe.plan.spread import stride
from jitmoe.plan.variant import Variant
from jitmoe.prepare import prepare
from jitmoe.run import families
from jitmoe.run.arrays import view
from jitmoe.run.driver import device_spec
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.launch import JoinedParams, Kernel
from jitmoe.run.ranks import differences
from jitmoe.run.streams import current_stream, stream_address
from jitmoe.run.symmetric import Group, LocalGroup
from jitmoe.weights import ExpertWeights

MAX_READY = 4096  # remembered for a workspace; then all are made ready again


class Ready(NamedTuple):
    """What calls of the same layouts and bound share: all of a launch but addresses."""

    kernel: Kernel
    params: JoinedParams
    write_addresses: tuple[Callable[..., None], ...]
    grid: int
    generation: int  # of the memory


class _Rank(NamedTuple):
    """Arguments of one rank, read: layouts, the addresses of the call, and its y."""

    fit: Fit
    weights: ExpertWeights
    addresses: tuple[int, ...]
    out: object


def run(
    group: Group,
    workspace: GroupWorkspace | None,
    max_num_tokens: int | None,
    presum: bool,
    expert_map,
    given: Mapping[str, object],
    wants: Sequence,
    stream,
):
    """One launch for the ranks of `group` that this process drives. `given` are x, topk_ids,
    topk_weights, weights, out and expert_counts, of a LocalGroup a list of each; `wants` the fields
    of a Variant before those of the weights. Returns y, or a list of them.

    Raises ValueError for a group of several nodes.
    """
    if group.num_nodes > 1:
        raise ValueError(
            f"mega_moe runs inside one NVLink domain, the group has ranks of {group.num_nodes} "
            "nodes; take dispatch and combine, or a group of each node"
        )
    memory = workspace or implicit_workspace(group)
    if not isinstance(memory, GroupWorkspace) or memory.group is not group:
        raise ValueError("workspace must be a GroupWorkspace of the group, or left out")
    memory.check()
    is_local = isinstance(group, LocalGroup)
    ranks = [_read(*one) for one in (by_rank(group, given) if is_local else [given.values()])]
    bound = common_bound(group, [rank.fit.num_tokens for rank in ranks], max_num_tokens)
    map_address, map_shape = read_expert_map(expert_map, ranks[0].weights.device)
    if stream is None:
        stream = current_stream(ranks[0].fit.x.family, group.device)
    elif not isinstance(stream, int):
        stream = stream_address(stream)
    key = (tuple(rank.fit for rank in ranks), bound, presum, map_shape, tuple(wants))
    key += (tuple(id(rank.weights) for rank in ranks),)
    ready = memory.ready.get(key)
    if ready is None or ready.generation != memory.generation:
        ready = _make_ready(memory, ranks, bound, presum, map_shape, wants, stream, key)
    for workspace in memory.workspaces:
        workspace.note_launch(stream)
    for rank, write in zip(ranks, ready.write_addresses, strict=True):
        write(*rank.addresses, map_address)
    ready.params.join()
    ready.kernel.launch(ready.params, stream, True, ready.grid)
    return [rank.out for rank in ranks] if is_local else ranks[0].out


def run_alone(group: Group, workspace, given: Mapping[str, object], call: Callable):
    """The same for a group of one rank, which `call` serves without a group."""
    is_local = isinstance(group, LocalGroup)
    [(x, topk_ids, topk_weights, weights, out, expert_counts)] = (
        by_rank(group, given) if is_local else [given.values()]
    )
    if isinstance(workspace, GroupWorkspace):
        workspace = workspace.workspaces[0]
    options = {"out": out, "expert_counts": expert_counts, "workspace": workspace}
    y = call(x, topk_ids, topk_weights, weights, **options)
    return [y] if is_local else y


_DEFAULTS = {"plan": None, "backend": "cuda", "first_expert": 0}


def check_free(**values) -> None:
    """Refuse what a group has an answer of its own for."""
    for name, value in values.items():
        if value != _DEFAULTS[name]:
            raise ValueError(
                f"{name} must be {_DEFAULTS[name]!r} for a group, whose ranks plan alike on GPUs "
                f"and count their experts one after the other, got {value!r}; leave it out"
            )


def _check_alike(group: Group, ranks: Sequence[_Rank]) -> None:
    """Refuse ranks of one process that no one kernel serves, and weights elsewhere. Those of other
    processes are compared by their plans (GroupWorkspace.enter).
    """
    kinds = [
        {
            "num_experts": rank.weights.num_experts,
            "hidden": rank.weights.hidden,
            "intermediate": rank.weights.intermediate,
            "format": rank.weights.format,
            "gate_up": rank.weights.gate_up,
            "gated": rank.weights.gated,
            "has_bias": rank.weights.has_bias,
            "top_k": rank.fit.top_k,
        }
        for rank in ranks
    ]
    found = differences(kinds)
    if found:
        raise ValueError(
            f"ranks must have weights and slots of the same kind: {', '.join(found)}; pass the "
            "same on all"
        )
    for rank in ranks:
        if rank.weights.device != group.device:
            raise ValueError(
                f"the weights are on GPU {rank.weights.device}, the group is on GPU "
                f"{group.device}; make a group on the device of the weights"
            )


def implicit_workspace(group: Group) -> GroupWorkspace:
    """The workspace of a group's calls that name none; the group keeps it."""
    if group.workspace is None:
        group.workspace = GroupWorkspace(group)
    return group.workspace


def by_rank(
    group: Group, given: Mapping[str, object], optional: Sequence[str] = ("out", "expert_counts")
) -> Iterator[tuple]:
    """The arguments of each rank of a LocalGroup; None for all of an optional one."""
    lists = {}
    for name, values in given.items():
        if values is None and name in optional:
            values = [None] * group.num_ranks
        if not isinstance(values, list) or len(values) != group.num_ranks:
            got = f"{len(values)} items" if isinstance(values, list) else type(values).__name__
            raise ValueError(
                f"{name} must be a list with an item for each of the {group.num_ranks} ranks of "
                f"the LocalGroup, got {got}"
            )
        lists[name] = values
    return zip(*lists.values(), strict=True)


def _read(x, topk_ids, topk_weights, weights: ExpertWeights, out, expert_counts) -> _Rank:
    x_rows, x_scale = split_x(x)
    fit, x_ptr, scale_ptr, ids_ptr, router_ptr, y_ptr, counts_ptr = read_call(
        x_rows, x_scale, topk_ids, topk_weights, weights, out, expert_counts
    )
    if out is None:
        device, family = weights.device, fit.x.family
        out = families.empty_rows(fit.num_tokens, weights.hidden, x_rows, family, device)
        y_ptr = view(out, "out").ptr
    addresses = (x_ptr, scale_ptr, ids_ptr, router_ptr, *weights.scale_addresses, y_ptr, counts_ptr)
    return _Rank(fit, weights, addresses, out)


def common_bound(group: Group, counts: Sequence[int], given: int | None) -> int:
    """Tokens of a rank that all ranks plan for; `counts` are those of the ranks here."""
    most = max(counts)
    if given is None:
        if len(group.ranks) < group.num_ranks:
            raise ValueError(
                "max_num_tokens must be given where ranks are processes of their own: all must "
                "take the same kernel; pass the most tokens of any rank in this call"
            )
        return max(most, 1)
    if not given >= 1 or most > given:
        raise ValueError(
            f"a rank has {most:,} tokens, max_num_tokens is {given:,}; pass a bound, the same on "
            "all ranks, that holds for each"
        )
    return given


def find_plan(
    group: Group, weights: ExpertWeights, bound: int, top_k: int, presum: bool, variant: Variant
) -> MegaMoePlan:
    """The same on all ranks: of a rank's share, as if its tokens were all for its own experts."""
    gpu = device_spec(weights.device)
    fields = {
        "num_ranks": group.num_ranks,
        "local_ranks": len(group.ranks),
        "presum": presum,
        **variant.plan_fields,
    }
    return heuristics.choose(weights.problem(bound, top_k), gpu, **fields)


def _make_ready(
    memory: GroupWorkspace,
    ranks: Sequence[_Rank],
    bound: int,
    presum: bool,
    map_shape: tuple[int, int],
    wants: Sequence,
    stream: int,
    key: tuple,
) -> Ready:
    group, first = memory.group, ranks[0]
    _check_alike(group, ranks)
    num_addresses = len(first.addresses) + 1  # and expert_map's
    variant = Variant(*wants, **first.weights.variant_fields)
    plan = find_plan(group, first.weights, bound, first.fit.top_k, presum, variant)
    peers, offsets, capacity = memory.reserve(plan, bound, stream)
    blocks = []
    for rank, number, workspace in zip(ranks, group.ranks, memory.workspaces, strict=True):
        prepared = prepare(rank.weights, plan, workspace, group.num_ranks * capacity, stream)
        grid = prepared.kernel.grid // len(ranks)
        fit, x_is_bf16 = rank.fit, rank.fit.x_scale is None
        params = prepared.params.copy()
        params.write(
            *[0] * num_addresses,
            *prepared.memory,
            workspace.status_address,
            *rank.weights.bias_fields,
            fit.x.strides[0] * (2 if x_is_bf16 else 1),
            *fit.x_scale_strides,
            *prepared.scale_strides,
            rank.weights.hidden if fit.out is None else fit.out.strides[0],
            group.num_ranks * bound,
            prepared.bank_words,
            stride(grid),
            prepared.row_capacity,
            x_is_bf16,
            fit.topk_ids.dtype == "i64",
            fit.topk_weights.dtype != "f32",
            workspace.timeout_us,
            *(variant.scalars(plan.format) | {"first_expert": number * plan.num_experts}).values(),
            peers,
            *(offsets[name] for name in SYMMETRIC),
            number,
            bound,
            fit.num_tokens,
            capacity,
            *map_shape,
        )
        blocks.append(params)
    memory.enter(plan, bound, plan_hash(plan))
    if len(memory.ready) >= MAX_READY:
        memory.ready.clear()
    ready = memory.ready[key] = Ready(
        prepared.kernel,
        JoinedParams(blocks),
        tuple(block.address_writer(num_addresses) for block in blocks),
        grid * len(ranks),
        memory.generation,
    )
    return ready
