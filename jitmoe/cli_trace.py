"""`jitmoe trace`: one launch of a layer, as a timeline of what every warp did and waited for."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from jitmoe.cli_layer import (
    Activation,
    Config,
    Ep,
    Experts,
    Hidden,
    Intermediate,
    Json,
    Model,
    TopK,
    layer_shape,
    title,
)

SMALL_LAYER = {"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2}


def trace(
    model: Model = None,
    config: Config = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ep = 1,
    activation: Activation = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the call.")] = 40,
    routing: Annotated[
        str,
        typer.Option(help="uniform, zipf, hot_expert, one_expert, unused or duplicates."),
    ] = "uniform",
    out: Annotated[Path, typer.Option(help="JSON to write, for ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
    png: Annotated[Path | None, typer.Option(help="Picture to write; needs jitmoe[trace].")] = None,
    block: Annotated[int, typer.Option(min=0, help="Block that the picture shows by warp.")] = 0,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="On this CPU, the emulator's steps for time.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a layer once with stamps in its kernel, and show where the time went.

    Without a Hopper GPU a small layer is run, emulated. `--emulated` runs the layer that is named,
    or the small one.
    """
    layer = {
        "model": model,
        "config": config,
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts,
        "top_k": top_k,
    }
    if png is not None and find_spec("matplotlib") is None:
        from jitmoe.tracing.plot import NEEDS_MATPLOTLIB

        typer.echo(f"jitmoe: {NEEDS_MATPLOTLIB}", err=True)
        raise typer.Exit(1)
    takes_small = emulated and all(value is None for value in layer.values())
    if not emulated and not _has_hopper():
        typer.echo(
            "jitmoe: no Hopper GPU was found: a small layer is run, emulated, and times are steps "
            "of the emulator",
            err=True,
        )
        emulated = takes_small = True
    if takes_small:
        layer, ep = {"model": None, "config": None} | SMALL_LAYER, 1
    shape = layer_shape(**layer, activation=activation)
    traced = _run(shape.problem(tokens, ep), shape.variant, routing, emulated)
    traced.to_perfetto(out)
    if png is not None:
        traced.plot(png, block)
    summary = traced.summary()
    if as_json:
        typer.echo(json.dumps({"layer": title(shape, ep), **asdict(summary)}, indent=2))
        return
    typer.echo(f"{title(shape, ep)}: {tokens:,} tokens, {routing} routing")
    typer.echo("\n".join(_lines(summary)))
    typer.echo(f"-> {out}" + (f", {png}" if png else ""))


def _has_hopper() -> bool:
    from jitmoe.run.driver import DriverError, device_spec, num_devices

    try:
        return num_devices() > 0 and device_spec(0).arch == "sm_90a"
    except (ValueError, DriverError):
        return False


def _run(problem, variant, routing: str, emulated: bool):
    """The Trace of a random call, the same every time."""
    import numpy as np

    from jitmoe import fp8, measure, reference
    from jitmoe.traced import trace as run

    if emulated:
        xp = np
    else:
        import cupy as xp
    sizes = problem.hidden, problem.num_experts, problem.top_k
    call = reference.random_tokens(problem.num_tokens, *sizes, 1, routing, xp)
    experts = measure.random_experts(problem, variant, 0, xp)
    return run(
        fp8.encode_bf16(call.x, xp),
        call.topk_ids,
        call.topk_weights,
        experts.weights(problem.format, variant.gate_up),
        activation=variant.activation,
        backend="emulated" if emulated else "cuda",
    )


def _lines(summary) -> list[str]:
    unit, whole = summary.unit, max(summary.duration, 1)

    def span(value: float) -> str:
        return f"{value:,.0f} {unit} ({value / whole:.1%})"

    lines = [
        f"launch                {summary.duration:,} {unit}, {summary.num_blocks} blocks, "
        f"{summary.num_events:,} events, {summary.num_lost:,} stamps lost",
        f"clock                 stamps differ by {summary.resolution:,} {unit} at least",
        f"to the first multiply {span(summary.first_mma)}, of the median block",
        f"main loops            {summary.mma:.1%} of math's time",
        f"last multiply         {span(summary.mma_end_spread)} from the first block to the last",
        f"tail after the last   {span(summary.tail)}",
    ]
    for role, busy in summary.busy.items():
        waits = sorted(summary.waits[role].items(), key=lambda item: -item[1])
        waited = ", ".join(f"{name} {time / whole:.1%}" for name, time in waits)
        lines.append(f"{role:<9}{busy:6.1%} busy; waits: {waited or 'none'}")
    return lines
