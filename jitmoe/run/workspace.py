"""Workspace: the memory a kernel needs between its phases, its counters, and what it says when a
wait runs out.
"""

from __future__ import annotations

import itertools

from jitmoe import settings
from jitmoe.plan.plan import Plan
from jitmoe.run.driver import is_capturing
from jitmoe.run.streams import on_stream

STATUS_WORDS = 16

# By the numbers of `enum Wait` in templates/device/check.cuh.
_WAITS = {
    1: "stage {index} of the ring to be filled",
    2: "stage {index} of the ring to be freed",
    3: "task slot {index} to be filled",
    4: "task slot {index} to be freed",
    5: "{expected} blocks at the grid barrier",
    6: "{expected} blocks to finish the head",
    7: "{expected} finished GEMM 1 tiles of block {index}",
    8: "the tile of task slot {index} to be stored",
    9: "list {index} of tokens to be filled",
    10: "first weight tile {index} to land",
    11: "the next task to be wanted",
    12: "packed weights of stage {index} to land",
    13: "packed weights of stage {index} to be expanded",
    14: "the last tokens to be summed",
    15: "the routing of rank {index}",
    16: "the tokens of rank {index}",
    17: "rows of expert {index}, which rank {owner} owes",
    18: "rank {index} to pass the same max_num_tokens: it passed {expected}",
    19: "rank {index} to say how many tokens it sends",
    20: "the tokens that rank {index} sends",
    21: "rank {index} to take sums",
    22: "the sums that rank {index} sends",
    23: "rank {index} on another node to enter the launch",
    24: "the messages of rank {index} on another node",
    25: "the rows that rank {index} on this node brings",
    26: "the sums of rank {index} on another node",
    27: "the network to take what rank {index} puts (NCCL says {expected})",
}


_serials = itertools.count()


class DeviceTimeout(RuntimeError):
    """A wait inside a kernel ran out of its budget; the text says who waited for what.

    The context survives.
    """


class CaptureError(RuntimeError):
    """Something that cannot be done while a CUDA graph is captured."""


class Workspace:
    """Device memory for calls on one device and one stream at a time; grows on demand outside graph
    capture.

    device      CUDA device number (default: CuPy's current device)
    max_tokens  reserve for calls of this many tokens when a plan is first used
    timeout_s   budget of every wait inside a kernel, in seconds (default JITMOE_TIMEOUT_S)

    Two calls that may run at the same time need two workspaces.
    """

    def __init__(
        self, device: int | None = None, max_tokens: int = 0, timeout_s: float | None = None
    ):
        import cupy

        self.device = cupy.cuda.Device().id if device is None else device
        self.max_tokens = max_tokens
        timeout_s = settings.get("JITMOE_TIMEOUT_S") if timeout_s is None else timeout_s
        if not 0 < timeout_s <= 3600:
            raise ValueError(f"timeout_s must be above 0 and at most 3600 seconds, got {timeout_s}")
        self.timeout_us = max(1, int(timeout_s * 1e6))
        self.serial = next(_serials)  # unlike id(), never used again
        # Counts moves of the memory, so that callers know when pointers changed.
        self.generation = 0
        self.ready: dict = {}  # launches that callers made ready (fused.py), until the memory moves
        self._scratch = None
        self._controls: dict[Plan, tuple[int, object]] = {}
        self._retired: list[object] = []
        self._captured = False
        with cupy.cuda.Device(self.device):
            self._status_memory = cupy.cuda.alloc_pinned_memory(4 * STATUS_WORDS)
        self.status_address = self._status_memory.ptr
        self._status = memoryview(self._status_memory).cast("B")[: 4 * STATUS_WORDS].cast("I")
        self._clear_status()

    @property
    def num_bytes(self) -> int:
        """Device memory held now."""
        arrays = [
            self._scratch,
            *(control for _, control in self._controls.values()),
            *self._retired,
        ]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def scratch(self):
        """The scratch memory, a CuPy uint8 array (None before the first call).

        Holds nothing between launches.
        """
        return self._scratch

    def reserve(self, plan: Plan, num_tokens: int, stream: int) -> dict[str, int]:
        """Addresses of every region for up to `num_tokens` tokens, by name.

        Raises CaptureError where memory would have to grow during graph capture, MemoryError where
        there is none.
        """
        capacity, control = self._controls.get(plan, (0, None))
        if (
            capacity < num_tokens
            or self._scratch is None
            or self._scratch_bytes(plan, num_tokens) > self._scratch.nbytes
        ):
            if is_capturing(stream):
                raise CaptureError(
                    f"the workspace must grow to {num_tokens} tokens, which a graph capture "
                    f"forbids; call jitmoe.warmup(..., num_tokens={num_tokens}) or the layer "
                    "itself once before capturing"
                )
            capacity, control = self._grow(plan, max(num_tokens, self.max_tokens), stream)
        scratch, counters = plan.scratch(capacity), plan.control(capacity)
        return {
            name: self._scratch.data.ptr + offset for name, offset in scratch.offsets.items()
        } | {name: control.data.ptr + offset for name, offset in counters.offsets.items()}

    def note_launch(self, stream: int) -> None:
        """A captured graph keeps the addresses of this launch: memory it uses is never freed from
        now on.
        """
        if not self._captured:
            self._captured = is_capturing(stream)

    @property
    def is_captured(self) -> bool:
        """Whether a captured graph points to this memory."""
        return self._captured

    def bank_words(self, plan: Plan) -> int:
        """Words of one bank of counters at the reserved capacity."""
        return plan.bank_words(self._controls[plan][0])

    def capacity(self, plan: Plan) -> int:
        """Tokens reserved for `plan`; 0 before its first call."""
        return self._controls.get(plan, (0, None))[0]

    @staticmethod
    def _scratch_bytes(plan: Plan, num_tokens: int) -> int:
        return plan.scratch(num_tokens).num_bytes

    def _grow(self, plan: Plan, num_tokens: int, stream: int) -> tuple[int, object]:
        import cupy

        old_capacity, old_control = self._controls.get(plan, (0, None))
        capacity = max(old_capacity, num_tokens)
        # Not for every token more: a quarter ahead, as far as that is less than 4096 tokens.
        capacity = (
            -(-max(capacity, min(old_capacity + old_capacity // 4, old_capacity + 4096)) // 64) * 64
        )
        # Even if memory runs out: some of the old may be gone by then.
        self.generation += 1
        self.ready.clear()
        with cupy.cuda.Device(self.device), on_stream(stream):
            try:
                control = old_control
                if capacity > old_capacity:
                    control = cupy.zeros(plan.control(capacity).num_bytes, dtype=cupy.uint8)
                    self._retire(old_control)
                    self._controls[plan] = (capacity, control)
                wanted = self._scratch_bytes(plan, capacity)
                if self._scratch is None or self._scratch.nbytes < wanted:
                    self._retire(self._scratch)
                    self._scratch = None  # its memory may serve the larger one
                    self._scratch = cupy.empty(wanted, dtype=cupy.uint8)
            except cupy.cuda.memory.OutOfMemoryError as error:
                self._controls.pop(plan, None)
                raise MemoryError(
                    f"a workspace for {capacity} tokens needs "
                    f"{plan.workspace_bytes(capacity):,} bytes of GPU memory: {error}; "
                    "split the batch"
                ) from error
        return self._controls[plan]

    def _retire(self, array) -> None:
        # A captured graph still points to it.
        if array is not None and self._captured:
            self._retired.append(array)

    def check(self) -> None:
        """Raise DeviceTimeout if a launch ran out of a wait's budget.

        Synchronise the stream first to be sure of the last.
        """
        if self._status[0]:
            raise DeviceTimeout(self._describe())

    def _describe(self) -> str:
        _, what, block, warp, index, expected = self._status[:6]
        experts = next((plan.num_experts for plan in self._controls if plan.num_ranks > 1), 1)
        awaited = _WAITS.get(what, f"wait {what}").format(
            index=index, expected=expected, owner=index // experts
        )
        # The buckets' plans give some warps different roles.
        roles = dict.fromkeys(r for p in self._controls for r in _roles_of_warp(p, warp))
        role = " or ".join(roles) or "?"
        return (
            f"after {self.timeout_us / 1e6:g} s, role {role} (warp {warp}) of block {block} "
            f"still waited for {awaited}. Results of that launch and of later ones are invalid; "
            "call Workspace.reset() and run again. A kernel that holds SMs on another stream, or a "
            "debugger, can cause it: give the wait more time with timeout_s"
        )

    def reset(self) -> None:
        """Re-arm after a DeviceTimeout: waits for the device, then zeroes every counter."""
        import cupy

        with cupy.cuda.Device(self.device) as device:
            device.synchronize()
            for _, control in self._controls.values():
                control.fill(0)
            device.synchronize()
        self._clear_status()

    def _clear_status(self) -> None:
        for i in range(STATUS_WORDS):
            self._status[i] = 0


def _roles_of_warp(plan: Plan, warp: int):
    first = 0
    for role in plan.roles:
        if first <= warp < first + role.num_warps:
            yield role.name
        first += role.num_warps


_implicit: dict[tuple[int, int], Workspace] = {}


def implicit_workspace(device: int, stream: int) -> Workspace:
    """The workspace of calls that name none: one for each device and stream."""
    workspace = _implicit.get((device, stream))
    if workspace is None:
        if is_capturing(stream):
            raise CaptureError(
                "the first call on this stream is inside a graph capture; call "
                "jitmoe.warmup(...) or the layer once on the stream before capturing, "
                "or pass workspace="
            )
        workspace = _implicit[device, stream] = Workspace(device)
    return workspace
