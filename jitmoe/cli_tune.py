"""`jitmoe tune`: a sweep of plans on this GPU, what it found, and the tuned file of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from jitmoe.cli_layer import (
    Activation,
    Config,
    Ep,
    Experts,
    Format,
    Hidden,
    Intermediate,
    Json,
    Model,
    TopK,
    gpu_to_measure,
    layer_shape,
)

SITE = "site"


def tune(
    model: Model = None,
    config: Config = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ep = 1,
    format: Format = None,
    activation: Activation = None,
    shapes: Annotated[
        str | None, typer.Option(help="Of S1,S2,S3,S4, where no layer is named; default: S1,S2.")
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Tokens of a call, with commas between.")
    ] = "1,8,32,128,512,2048,8192",
    space: Annotated[
        str | None,
        typer.Option(
            help='Plan fields and values, all combinations: "num_stages=3,4 unroll_k=1,2". '
            "Default: one field at a time."
        ),
    ] = None,
    skew: Annotated[
        str,
        typer.Option(
            help="uniform, zipf (exponent 1.2), hot_expert, one_expert, unused or duplicates; "
            "uniform alone is saved."
        ),
    ] = "uniform",
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no trial is started.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="A .jsonl file of rows, to go on with and append to.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times that what is ahead is measured; --save wants two.")
    ] = 2,
    save: Annotated[
        str | None,
        typer.Option(help=f'Tuned file to put winners into, or "{SITE}" for the one of this site.'),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure plans beside the heuristic's, on this GPU, and keep those that win twice.

    A second call with the same --store goes on where the first ended.
    """
    from jitmoe import tuned
    from jitmoe.bench.points import named_shapes, token_counts
    from jitmoe.plan.variant import Activation as Kind
    from jitmoe.plan.variant import Variant
    from jitmoe.tune.sweeping import sweep
    from jitmoe.tune.winners import best, compare, place, table
    from jitmoe.tune.winners import save as save_rows

    sizes = (hidden, intermediate, experts, top_k)
    is_named = any(value is not None for value in (model, config, *sizes))
    if is_named and shapes is not None:
        raise ValueError("name the layer in one way: --shapes, or --model, --config or sizes")
    if is_named:
        shape = layer_shape(model, config, *sizes, activation)
        layers, variant = [shape.problem(0, ep, format)], shape.variant
    else:
        kind = Kind(activation or "swiglu")
        named = named_shapes(shapes or "S1,S2", format or "fp8_block", kind.gated)
        layers, variant = list(named.values()), Variant(kind)
    problems = [replace(layer, num_tokens=n) for layer in layers for n in token_counts(tokens)]
    values = None if space is None else _space(space)

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    if save is not None:
        _check_save(save, skew, rounds)
        place(None if save == SITE else save)
    gpu = gpu_to_measure("tune")
    say(f"{gpu.name}; rows -> {store or 'memory only'}; site file {tuned.site_file()}")
    options = {"skew": skew, "budget_s": budget, "store": store, "variant": variant, "say": say}
    rows = sweep(problems, values, rounds=rounds, gpu=gpu, **options)
    typer.echo(json.dumps(compare(rows), indent=2) if as_json else table(rows))
    failed = [row for row in rows if row["status"] != "ok"]
    for row in failed:
        say(
            f"{row['shape']} {row['num_tokens']} {row['changes']}: {row['status']}, {row['reason']}"
        )
    if save is not None:
        path = save_rows(rows, None if save == SITE else save)
        say(f"{len(best(rows))} plans -> {path}")
    if any(row["is_heuristic"] for row in failed):
        raise typer.Exit(1)


def _check_save(save: str, skew: str, rounds: int) -> None:
    """Raises ValueError for options by which nothing could be saved."""
    if save != SITE and not save.endswith(".json"):
        raise ValueError(f'save must be "{SITE}" or a .json file, got {save!r}')
    if rounds < 2:
        raise ValueError(f"--save needs two rounds, got {rounds}: a winner wins twice")
    if skew != "uniform":
        raise ValueError(f"--save needs uniform routing, got {skew}; leave one of the two out")


def _space(text: str) -> dict[str, list]:
    """Of "num_stages=3,4 bucket=decode" the fields and values. Raises ValueError."""
    space = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        if not equals or not all(values.split(",")):
            raise ValueError(
                f'space must be fields and values such as "num_stages=3,4 unroll_k=1", got {text!r}'
            )
        space[name] = [int(v) if v.isdecimal() else v for v in values.split(",")]
    return space
