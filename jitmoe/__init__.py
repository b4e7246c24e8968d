"""jitmoe: the whole mixture-of-experts layer as one CUDA kernel launch, generated for the caller's
shape.

Importing it touches no GPU, imports no CuPy and creates no file.
"""

from jitmoe.dispatched import Dispatched, DispatchHandle
from jitmoe.fused import mega_moe
from jitmoe.jit.nvrtc import CompileError
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import Activation
from jitmoe.run.driver import DriverError
from jitmoe.run.group_workspace import GroupWorkspace
from jitmoe.run.nccl_group import NcclGroup
from jitmoe.run.peer_group import PeerGroup
from jitmoe.run.ranks import RankError, RankMismatch
from jitmoe.run.symmetric import LocalGroup
from jitmoe.run.workspace import CaptureError, DeviceTimeout, Workspace
from jitmoe.traced import trace
from jitmoe.tracing.trace import Trace
from jitmoe.unfused import combine, dispatch
from jitmoe.warming import warmup, workspace_bytes
from jitmoe.weights import ExpertWeights

__all__ = [
    "Activation",
    "CaptureError",
    "CompileError",
    "DeviceTimeout",
    "DispatchHandle",
    "Dispatched",
    "DriverError",
    "ExpertWeights",
    "GroupWorkspace",
    "LocalGroup",
    "MegaMoePlan",
    "MoeProblem",
    "NcclGroup",
    "PeerGroup",
    "PlanError",
    "RankError",
    "RankMismatch",
    "Trace",
    "Workspace",
    "combine",
    "dispatch",
    "mega_moe",
    "trace",
    "warmup",
    "workspace_bytes",
]
