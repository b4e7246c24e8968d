"""The command line, a thin shell: options in, text out. Nothing imports it but `__main__`.

Heavy imports sit inside the commands, so that `--help` is quick. Exit codes: 0 done, 1 something
failed or was found wrong, 2 a mistake of the user (one sentence on stderr).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from typer.core import TyperGroup

from jitmoe.cli_bench import bench
from jitmoe.cli_cache import app as cache_app
from jitmoe.cli_emulate import emulate
from jitmoe.cli_layer import (
    Activation,
    Bias,
    Config,
    Ep,
    Experts,
    Format,
    GateUp,
    Hidden,
    Intermediate,
    Json,
    Model,
    Presum,
    Ranks,
    TopK,
    WeightOnInput,
    layer_shape,
    layer_variant,
    rank_fields,
    shares,
    title,
)
from jitmoe.cli_show import (
    Kernel,
    Layout,
    Nodes,
    ShowFormat,
    ShowRail,
    ShowRanks,
    check_options,
    transfer_plan,
)
from jitmoe.cli_trace import trace
from jitmoe.cli_tune import tune

TokenCount = Annotated[int, typer.Option(help="Tokens of a call.")]
Gpu = Annotated[
    str | None,
    typer.Option(help="h200, h100-sxm, h100-pcie or h20; default: the GPU found here, else h200."),
]


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn errors into a sentence on stderr: exit 2 for the user's mistakes, 1 for failures."""
    from jitmoe.emulate.compile import HostCompileError, NoHostCompiler
    from jitmoe.jit.nvrtc import CompileError
    from jitmoe.jit.store import CacheError
    from jitmoe.run.driver import DriverError
    from jitmoe.run.workspace import DeviceTimeout

    try:
        yield
    except ValueError as error:  # PlanError, LayoutError and RenderError too
        typer.echo(f"jitmoe: {error}", err=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # `jitmoe show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (
        CompileError,
        CacheError,
        DriverError,
        DeviceTimeout,
        NoHostCompiler,
        HostCompileError,
        OSError,
        MemoryError,
    ) as error:
        typer.echo(f"jitmoe: {error}", err=True)
        raise typer.Exit(1) from None


class _Group(TyperGroup):
    """The commands, with errors made readable."""

    def invoke(self, ctx):
        with _sentences():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    help="The whole mixture-of-experts layer as one CUDA kernel launch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache_app, name="cache")


def _console():
    """A console whose lines do not break at 80 columns when piped."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def _spec(name: str | None):
    """The GPU called `name`, else the one found here if kernels exist for it, else the H200."""
    from jitmoe.plan.gpu import gpu_spec
    from jitmoe.run.driver import DriverError, device_spec, num_devices

    if name is None and num_devices() > 0:
        try:
            return device_spec(0)
        except (ValueError, DriverError):
            pass
    return gpu_spec(name or "h200")


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib import metadata

        try:
            typer.echo(f"jitmoe {metadata.version('jitmoe')}")
        except metadata.PackageNotFoundError:
            typer.echo("jitmoe, run from a checkout")
        raise typer.Exit


@app.command()
def plan(
    model: Model = None,
    config: Config = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ep = 1,
    format: Format = None,
    activation: Activation = None,
    gate_up: GateUp = None,
    weight_on_input: WeightOnInput = False,
    bias: Bias = False,
    tokens: TokenCount = 32,
    ranks: Ranks = 1,
    presum: Presum = False,
    gpu: Gpu = None,
    as_json: Json = False,
) -> None:
    """Print the plan of a layer: bucket, roles, shared memory, grid, floor. Needs no GPU.

    With --ranks, that of one of them, its symmetric memory and the bytes that leave it.
    """
    from jitmoe.report import plan_report, print_plan

    shape = layer_shape(model, config, hidden, intermediate, experts, top_k, activation)
    fields = layer_variant(shape, gate_up, weight_on_input, bias).plan_fields
    fields |= rank_fields(ranks, presum)
    report = plan_report(shape.problem(tokens, shares(ep, ranks), format), _spec(gpu), **fields)
    note = shape.note if report["problem"]["format"] == shape.format else ""
    if as_json:
        typer.echo(json.dumps({"layer": title(shape, ep, ranks), "note": note, **report}, indent=2))
    else:
        print_plan(_console(), title(shape, ep, ranks), report, note)


@app.command()
def show(
    context: typer.Context,
    kernel: Kernel = "mega-moe",
    model: Model = None,
    config: Config = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ep = 1,
    format: ShowFormat = None,
    activation: Activation = None,
    gate_up: GateUp = None,
    weight_on_input: WeightOnInput = False,
    bias: Bias = False,
    tokens: TokenCount = 32,
    ranks: ShowRanks = 8,
    nodes: Nodes = 2,
    rail: ShowRail = "memory",
    layout: Layout = "tokens",
    gpu: Gpu = None,
    plain: Annotated[bool, typer.Option(help="Without colours.")] = False,
) -> None:
    """Print the CUDA source of a layer's kernel, or of dispatch or combine. Needs no GPU."""
    from jitmoe.jit.render import render
    from jitmoe.tuned import choose

    check_options(context, kernel)
    spec = _spec(gpu)
    if kernel == "mega-moe":
        shape = layer_shape(model, config, hidden, intermediate, experts, top_k, activation)
        fields = layer_variant(shape, gate_up, weight_on_input, bias).plan_fields
        found = choose(shape.problem(tokens, ep, format), spec, **fields).plan
    else:
        sizes = hidden, experts, top_k
        of_ranks = ranks, nodes, rail
        found = transfer_plan(kernel, model, config, *sizes, *of_ranks, layout, format, spec)
    text = render(found)
    if plain or not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.syntax import Syntax

    _console().print(Syntax(text, "cuda", background_color="default"))


@app.command()
def warmup(
    model: Model = None,
    config: Config = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ep = 1,
    format: Format = None,
    activation: Activation = None,
    gate_up: GateUp = None,
    weight_on_input: WeightOnInput = False,
    bias: Bias = False,
    arch: Annotated[str, typer.Option(help="Architecture to build for.")] = "sm_90a",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Kernels at a time.")] = 1,
) -> None:
    """Build every kernel a model needs into the disk cache. Needs no GPU."""
    from jitmoe.prebuild import model_plans, prebuild

    shape = layer_shape(model, config, hidden, intermediate, experts, top_k, activation)
    fields = layer_variant(shape, gate_up, weight_on_input, bias).plan_fields
    plans = model_plans(shape, ep, arch, format, **fields)
    if not prebuild(plans, jobs, _console()):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Say what was found where, what is missing and how to get it."""
    from jitmoe.doctor import examine, print_findings

    findings = examine()
    print_findings(_console(), findings)
    if any(finding.status == "missing" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    model: Model = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share the experts.")] = None,
    format: Format = None,
    activation: Activation = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a call; may be given several times.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Kernels at a time.")] = 2,
) -> None:
    """Run a layer and check it against the oracle. Without a GPU: build it, check the oracle."""
    from jitmoe.demo import demo as run_demo

    shape = layer_shape(model or "deepseek-v3", *[None] * 5, activation)
    default_ep = 8 if model is None else 1
    if not run_demo(
        _console(), shape, ep or default_ep, tokens or None, jobs, format or shape.format
    ):
        raise typer.Exit(1)


app.command()(emulate)
app.command()(bench)
app.command()(trace)
app.command()(tune)
