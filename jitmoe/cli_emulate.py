"""`jitmoe emulate`: a layer's kernel run on this CPU under seeded schedules, against the oracle."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

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

SMALL_LAYER = {"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2}
_WARN_S = 30.0


def emulate(
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
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the call.")] = 40,
    routing: Annotated[
        str,
        typer.Option(help="uniform, zipf, hot_expert, one_expert, unused or duplicates."),
    ] = "uniform",
    ranks: Ranks = 1,
    presum: Presum = False,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of the grid, of each rank.")] = 4,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="The schedule; the same again replays it.")
    ] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Schedules to run, from --seed on, until one fails.")
    ] = 1,
    checked: Annotated[
        bool,
        typer.Option("--checked", help="Find data races and undefined behaviour; 20 times slower."),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Launches at a time.")] = 1,
    as_json: Json = False,
) -> None:
    """Run a layer's kernel on this CPU, thread by thread, and check it. Needs no GPU.

    Without a layer's name a small one is run. With --ranks, several launches in a row, with other
    numbers of tokens on each rank. Needs a C++ compiler.
    """
    from jitmoe.emulate import ranks_session
    from jitmoe.emulate import session as emulation
    from jitmoe.plan.gpu import gpu_spec
    from jitmoe.plan.heuristics import choose

    layer = {
        "model": model,
        "config": config,
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts,
        "top_k": top_k,
    }
    named = any(value is not None for value in layer.values())
    named_by = layer if named else layer | SMALL_LAYER
    shape = layer_shape(**named_by, activation=activation)
    problem = shape.problem(tokens, shares(ep, ranks), format)
    variant = layer_variant(shape, gate_up, weight_on_input, bias)
    kind = variant.activation.kind
    fields = variant.plan_fields | rank_fields(ranks, presum)
    plan = choose(problem, gpu_spec("h200"), **fields)
    is_many = ranks > 1
    module, each = (ranks_session, " a rank") if is_many else (emulation, "")
    repeats = ranks * (ranks_session.NUM_LAUNCHES if is_many else 1)
    open_s, launch_s = emulation.expected_seconds(problem, checked)
    _warn_if_slow(open_s * ranks, launch_s * repeats)
    session = module.open_session(plan, tokens, routing, blocks, checked, variant)
    if not as_json:
        typer.echo(
            f"{title(shape, ep, ranks)}: {'up to ' * is_many}{tokens:,} tokens{each}, hidden "
            f"{shape.hidden:,}, intermediate {shape.intermediate:,}, {problem.num_experts} experts"
            f"{each}, top_k {shape.top_k}; {problem.format}, {kind}"
            f"{', up first' * plan.up_first}{', interleaved' * plan.interleaved}"
            f"{', biases' * plan.has_bias}{', router weights on tokens' * weight_on_input}"
            f"{', rows summed before they travel' * presum}, "
            f"{plan.bucket} kernel, {blocks} block{'s' * (blocks > 1)}, "
            f"{routing} routing{', checked' * checked}"
        )
    start = time.perf_counter()
    outcomes = []
    run = partial(module.run_seed, session)
    for outcome in emulation.run_seeds(run, range(seed, seed + seeds), jobs):
        outcomes.append(outcome)
        if not as_json:
            typer.echo("\n".join([_line(outcome), *_rank_lines(outcome)]))
    seconds = time.perf_counter() - start

    last = outcomes[-1]
    call = {"ep": ep, "tokens": tokens, "routing": routing, "blocks": blocks, "seed": last.seed}
    call |= {"activation": activation, "format": format, "gate_up": gate_up}
    call |= {"ranks": ranks} if is_many else {}
    flags = ["--checked"] * checked + ["--weight-on-input"] * weight_on_input + ["--bias"] * bias
    flags += ["--presum"] * presum
    replay = None if last.is_right else _command(layer | call, flags)
    if as_json:
        report = {
            "layer": title(shape, ep, ranks),
            "problem": asdict(problem),
            "activation": kind,
            "gate_up": variant.gate_up,
            "weight_on_input": weight_on_input,
            "bias": variant.has_bias,
            "bucket": plan.bucket,
            "routing": routing,
            "num_ranks": ranks,
            "presum": presum,
            "num_blocks": blocks,
            "checked": checked,
            "is_right": last.is_right,
            "seconds": seconds,
            "replay": replay,
            "seeds": [_row(outcome) for outcome in outcomes],
        }
        typer.echo(json.dumps(report, indent=2))
    elif seeds > 1:
        num_right = sum(outcome.is_right for outcome in outcomes)
        typer.echo(f"{num_right} of {len(outcomes)} seeds run are right, {seconds:.1f} s")
    if not last.is_right:
        if not as_json:
            typer.echo("\n".join(filter(None, (last.report, f"replay: {replay}"))))
        raise typer.Exit(1)


def _warn_if_slow(open_s: float, launch_s: float) -> None:
    if open_s + launch_s > _WARN_S:
        typer.echo(
            f"jitmoe: a large layer for a CPU: about {_duration(open_s)} to make its weights and "
            f"{_duration(launch_s)} a seed; fewer --tokens, a higher --ep or smaller sizes help",
            err=True,
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:,.0f} min"


def _line(outcome) -> str:
    start = f"seed {outcome.seed}: {'PASS' if outcome.is_right else 'FAIL'}"
    if outcome.steps is None:
        return f"{start}, stopped after {outcome.seconds:.1f} s"
    return (
        f"{start}, relative error {outcome.relative_error:.1e}, "
        f"worst element {outcome.worst_element:.1e}, "
        f"{outcome.steps:,} steps, {outcome.seconds:.1f} s"
    )


def _rank_lines(outcome) -> list[str]:
    return [
        f"  rank {rank}: {', '.join(f'{n:,}' for n in one.num_tokens)} tokens, "
        f"relative error {one.relative_error:.1e}, worst element {one.worst_element:.1e}"
        for rank, one in enumerate(outcome.ranks)
    ]


def _row(outcome) -> dict:
    """As JSON has it, which knows no infinity."""
    row = _finite(asdict(outcome) | {"is_right": outcome.is_right})
    return row | {"ranks": [_finite(one) for one in row["ranks"]]}


def _finite(row: dict) -> dict:
    return {name: None if value == float("inf") else value for name, value in row.items()}


def _command(options: dict, flags: list[str]) -> str:
    """The command line that runs one seed of these again."""
    words = ["jitmoe", "emulate"]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words + flags)
