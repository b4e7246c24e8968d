"""dispatch() and combine(): tokens to the ranks of their experts and back, for engines that have
grouped GEMMs of their own.
"""

from __future__ import annotations

from jitmoe import transfers
from jitmoe.dispatched import Dispatched, DispatchHandle
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.symmetric import Group, check_group


def dispatch(
    x,
    topk_ids=None,
    topk_weights=None,
    *,
    group: Group,
    num_experts: int | None = None,
    first_expert: int = 0,
    layout: str | None = None,
    alignment: int | None = None,
    format: str | None = None,
    exact: bool = False,
    handle: DispatchHandle | None = None,
    max_num_tokens: int | None = None,
    num_sms: int | None = None,
    workspace: GroupWorkspace | None = None,
    stream=None,
) -> Dispatched:
    """Send every token to the ranks that hold its experts, once to each, in one kernel launch.

    Rank r has experts first_expert + r * num_experts / ranks and on. Rows lie in the order of ranks
    and tokens, so the same call gives the same rows. All ranks call alike; of a LocalGroup x,
    topk_ids, topk_weights and handle are lists with an item a rank, and so is what is returned.

    In a group of several nodes a token goes once to each node that has experts of it, along its
    rank's rail, and from the rank there to those with the experts. What comes is the same, bit for
    bit and in the same order: rows, scales, ids, weights and counts.

    x             [num_tokens, hidden] bf16, or a pair of e4m3 [num_tokens, hidden] and f32 scales
                  [num_tokens, hidden / 128]
    topk_ids      [num_tokens, top_k] int32 or int64; an id outside [first_expert, first_expert +
                  num_experts) is an unused slot
    topk_weights  [num_tokens, top_k] f32 or bf16, which come along
    group         a LocalGroup, PeerGroup or NcclGroup of two ranks or more, on one node or several
    num_experts   of all ranks
    first_expert  id of the first of them, where ids count those of other groups too
    layout        "tokens" (default): a token has one row on each of its ranks; "experts": one for
                  each of its experts, sorted by expert, as grouped GEMMs take them
    alignment     layout "experts": the first row of each expert is a multiple of it (default 128);
                  rows in between hold nothing
    format        "bf16" or "fp8", of the rows that come (default: that of x). bf16 tokens are
                  quantised per token and 128 channels for "fp8"
    exact         whether to wait on the host until the number of rows is known, before they come,
                  and return arrays of as many. If not, the host waits for nothing and arrays have
                  room for all that can come; only this may be captured into a CUDA graph
    handle        of an earlier dispatch: send other tokens the same ways, to arrays of the same
                  sizes. topk_ids and topk_weights are left out, and what says how tokens go may be
    max_num_tokens
                  the most tokens of any rank in this call, the same on all ranks (default in a
                  LocalGroup: what the ranks have)
    num_sms       blocks of each rank (default: as many as keep its links busy, all in a
                  LocalGroup); between nodes the same on all ranks
    workspace     a GroupWorkspace (default: the group's)
    stream        an address or a CuPy or PyTorch stream (default: the current one)

    Raises TypeError for a host array; ValueError for shapes, dtypes, strides, layouts or devices
    that do not fit; PlanError, a ValueError, for rows or counts that shared memory has no room for;
    RankMismatch where ranks call otherwise; CaptureError if a kernel must be built or memory
    allocated during capture, or if exact is wanted there; DeviceTimeout if an earlier launch hung;
    MemoryError, DriverError; CompileError, which is a ToolchainError where a compiler, or for the
    rail "gin" NCCL's device library or nvJitLink, is missing.
    """
    check_group(group)
    how = transfers.How(
        num_experts, first_expert, layout, alignment, format, exact, max_num_tokens, num_sms
    )
    return transfers.run_dispatch(group, workspace, stream, how, x, topk_ids, topk_weights, handle)


def combine(
    y,
    handle: DispatchHandle,
    *,
    group: Group,
    bias=None,
    weighted: bool = True,
    out=None,
    num_sms: int | None = None,
    workspace: GroupWorkspace | None = None,
    stream=None,
):
    """Bring what came of dispatched tokens back to their ranks and add it up, in one kernel launch.

    Layout "tokens": out[t] is the sum of y's rows of token t on its ranks, each of which must be
    what its rank's experts make of it, router weights included. Layout "experts": rows of a token
    on one rank are first added up there, times their router weights, and rounded to bf16. Sums are
    in f32 and in fixed order: the same call gives the same bits. A token without experts gets
    zeros, or the biases.

    In a group of several nodes the sums of a token's ranks on a node are first added up there, and
    rounded to bf16 before that sum travels; then the nodes' sums, and biases. So y may differ from
    that of one node by that rounding.

    y             [rows, hidden] bf16, as many rows as Dispatched.x has and in their order; those
                  that came are read
    handle        of the dispatch; of a LocalGroup y, handle, bias and out are lists, an item a rank
    bias          None, or [num_tokens, hidden] bf16 to be added, such as a shared expert's output,
                  or a pair of them
    weighted      layout "experts": whether rows are multiplied by the router weights of their slots
    out           [num_tokens, hidden] bf16, written in place (default: a new array)
    num_sms, workspace, stream
                  as in `dispatch`

    Returns out. Raises what `dispatch` does, and ValueError for a handle of another group or rank.
    """
    check_group(group)
    return transfers.run_combine(group, workspace, stream, num_sms, y, handle, bias, weighted, out)
