"""Building a model's kernels ahead: `jitmoe warmup`, and the demo without a GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from jitmoe import tuned
from jitmoe.jit.build import Built, build_many
from jitmoe.jit.nvrtc import options, version
from jitmoe.plan.gpu import GPUS, KERNEL_ARCHS, GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.models import ModelShape


def gpu_of_arch(arch: str) -> GpuSpec:
    """A GPU of that architecture: plans do not differ among them. Raises ValueError."""
    if arch not in KERNEL_ARCHS:
        raise ValueError(f"arch must be {' or '.join(KERNEL_ARCHS)}, got {arch!r}")
    return next(spec for spec in GPUS.values() if spec.arch == arch)


def model_plans(
    shape: ModelShape, ep: int, arch: str, format: str | None = None, **variant
) -> list[MegaMoePlan]:
    """Every kernel one rank of the model can need at any token count, tuned ones too; `variant` is
    as in `heuristics.choose`, and weights are in the model's format unless another is named.
    """
    problem = shape.problem(1, ep, format)
    return tuned.plans_of_model(problem, gpu_of_arch(arch), **variant)


def prebuild(plans: Iterable[MegaMoePlan], jobs: int, console: Console) -> bool:
    """Build `plans` with a progress bar and a line for each, failures on stderr. True if all built.

    Raises ToolchainError if there is no compiler and ValueError for a setting of the wrong kind,
    before anything else.
    """
    plans = list(plans)
    options()
    compiler, start, failures = version(), time.perf_counter(), []
    with _progress(console) as progress:
        task = progress.add_task(f"building with NVRTC {compiler}", total=len(plans))
        for outcome in build_many(plans, jobs):
            if outcome.built is None:
                failures.append(f"{_label(outcome.plan)} failed: {outcome.error}")
            else:
                progress.console.print(Text(_line(outcome.built)), soft_wrap=True)
            progress.advance(task)
    seconds = time.perf_counter() - start
    console.print(f"{len(plans) - len(failures)} of {len(plans)} kernels ready in {seconds:.1f} s")
    for failure in failures:
        print(failure, file=sys.stderr)
    return not failures


def _progress(console: Console) -> Progress:
    """A bar on a terminal, nothing in a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _label(plan: MegaMoePlan) -> str:
    return f"{plan.name} {plan.bucket:<8}"


def _line(built: Built) -> str:
    used = built.cubin.resources
    how = "compiled" if built.origin == "compiled" else f"from {built.origin}"
    spilled = used.spill_store_bytes + used.spill_load_bytes
    return (
        f"{_label(built.plan)} {how} in {built.seconds:5.2f} s, {used.num_regs} registers, "
        f"{spilled} bytes spilled, {len(built.cubin.data):,} bytes -> {built.path or 'memory only'}"
    )
