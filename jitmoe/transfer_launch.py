"""One launch of dispatch or combine, for the ranks that this process drives."""

from __future__ import annotations

from jitmoe.fused_ranks import MAX_READY
from jitmoe.jit.render import plan_hash
from jitmoe.plan.hybrid import HybridPlan
from jitmoe.plan.transfer import TransferPlan, num_sms_wanted
from jitmoe.run.driver import device_spec, is_capturing
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.launch import JoinedParams, ParamBlock, load, loaded
from jitmoe.run.workspace import CaptureError


class Launch:
    """Kernel and memory, whose parameters are written rank by rank; get it from `ready`."""

    def __init__(
        self,
        workspace: GroupWorkspace,
        plan: TransferPlan,
        rank_tokens: int,
        stream: int,
        num_sms: int | None,
    ):
        import cupy

        group = workspace.group
        if loaded(plan, group.device) is None and is_capturing(stream):
            raise CaptureError(
                f"the kernel of {plan.name} is not loaded, which a graph capture forbids; call it "
                "once with the same arguments before capturing"
            )
        with cupy.cuda.Device(group.device):
            self._kernel = load(plan, group.device)
            reserved = workspace.reserve(plan, rank_tokens, stream)
            self._peers, self._offsets, self._capacity = reserved
            self._memory = [one.reserve(plan, 1, stream) for one in workspace.workspaces]
        workspace.enter(plan, rank_tokens, plan_hash(plan))
        self._workspace, self._plan = workspace, plan
        most = self._kernel.grid // len(group.ranks)
        if num_sms is not None and not 1 <= num_sms <= most:
            raise ValueError(
                f"num_sms must be 1 to {most}, the blocks of a rank that can run at once, got "
                f"{num_sms}"
            )
        wanted = num_sms or num_sms_wanted(device_spec(group.device), plan)
        num_blocks = min(wanted, most)
        self._grid = num_blocks * len(group.ranks)
        self._rank_tokens, self.channel_tokens = rank_tokens, 0
        if isinstance(plan, HybridPlan):
            self.channel_tokens = plan.channel_tokens(rank_tokens, num_blocks)
            group.agree("send between nodes", num_sms=num_blocks)  # channels go in pairs
        # Of rows that come to each rank, and of their scales.
        self.row_addresses = [
            tuple(workspace.address(plan, rank, name) for name in ("rows", "row_scales"))
            for rank in group.ranks
        ]
        self._blocks = [ParamBlock(plan) for _ in group.ranks]
        self._params = JoinedParams(self._blocks)
        self.generation = workspace.generation

    def memory(self, index: int, *names: str) -> tuple[int, ...]:
        """Addresses of regions of a rank's workspace, then of its status words."""
        own = self._memory[index]
        status = self._workspace.workspaces[index].status_address
        return *(own[name] for name in names), status

    def of_rank(self, index: int, channel_tokens: int = 0) -> tuple[int, ...]:
        """The plan's rank_params, with as many tokens a channel (default: this launch's)."""
        workspace, plan = self._workspace.workspaces[index], self._plan
        rank = self._workspace.group.ranks[index]
        params = (
            self._peers,
            *(self._offsets[name] for name in plan.symmetric_names),
            rank,
            workspace.bank_words(plan),
            workspace.timeout_us,
        )
        if not isinstance(plan, HybridPlan):
            return params
        rail = self._workspace.rail(plan, rank)
        tokens = channel_tokens or self.channel_tokens
        return *params, *rail, self._capacity, self._rank_tokens, tokens

    def write(self, index: int, *values) -> None:
        """All parameters of a rank, in order."""
        self._blocks[index].write(*values)

    def run(self, stream: int) -> None:
        for workspace in self._workspace.workspaces:
            workspace.note_launch(stream)
        self._params.join()
        self._kernel.launch(self._params, stream, True, self._grid)


def ready(
    workspace: GroupWorkspace,
    plan: TransferPlan,
    rank_tokens: int,
    stream: int,
    num_sms: int | None,
) -> Launch:
    """A launch for up to `rank_tokens` tokens of any rank, on `num_sms` blocks of each or as many
    as is best. Collective where it is new.
    """
    key = plan, rank_tokens, num_sms
    launch = workspace.ready.get(key)
    if launch is None or launch.generation != workspace.generation:
        if len(workspace.ready) >= MAX_READY:
            workspace.ready.clear()
        launch = workspace.ready[key] = Launch(workspace, plan, rank_tokens, stream, num_sms)
    return launch
