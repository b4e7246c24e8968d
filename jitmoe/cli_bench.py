"""`jitmoe bench`: the layer timed on this GPU, beside its peers and the floor."""

from __future__ import annotations

import json
import shlex
import sys
import time
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
    Presum,
    Ranks,
    TopK,
    gpu_to_measure,
    layer_shape,
    rank_fields,
    shares,
    title,
)


def bench(
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
        str | None, typer.Option(help="Of S1,S2,S3,S4; all of them unless a layer is named.")
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Tokens of a call, with commas between.")
    ] = "1,8,32,128,512,2048,8192",
    routing: Annotated[
        str,
        typer.Option(
            help="uniform, zipf (exponent 1.2), hot_expert, one_expert, unused or duplicates."
        ),
    ] = "uniform",
    ranks: Ranks = 1,
    presum: Presum = False,
    cool: Annotated[bool, typer.Option("--cool/--no-cool", help="Bursts on a cool card.")] = True,
    hot: Annotated[
        bool, typer.Option("--hot/--no-hot", help="After a second of work, in rows of their own.")
    ] = False,
    bursts: Annotated[int, typer.Option(min=1, help="Samples of each median.")] = 10,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Time other libraries that are installed.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no further point is started.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A .jsonl file to append rows to.")] = None,
    as_json: Json = False,
) -> None:
    """Time the layer on this GPU: CUDA graphs, weights from memory, checked by the oracle.

    Beside each time: floors by the table's rates and by those measured in the same run, the
    relative error and the host's time for an eager call. With --ranks, virtual ranks on this GPU,
    each with the experts of a shape, beside one with all; and bytes over links. Needs a Hopper GPU.
    """
    from jitmoe.bench.points import SHAPES, Points, named_shapes, token_counts
    from jitmoe.plan.variant import Activation as Kind
    from jitmoe.plan.variant import Variant

    sizes = (hidden, intermediate, experts, top_k)
    is_named = any(value is not None for value in (model, config, *sizes))
    if is_named and shapes is not None:
        raise ValueError("name the layer in one way: --shapes, or --model, --config or sizes")
    if peers and ranks > 1:
        raise ValueError("--peers are timed on one rank, got --ranks too; leave one of them out")
    fields = rank_fields(ranks, presum)
    if is_named:
        shape = layer_shape(model, config, *sizes, activation)
        layers = {title(shape, ep, ranks): shape.problem(0, shares(ep, ranks), format)}
        points = Points(layers, token_counts(tokens), routing, shape.variant, **fields)
    else:
        names, kind = ",".join(SHAPES) if shapes is None else shapes, Kind(activation or "swiglu")
        layers = named_shapes(names, format or "fp8_block", kind.gated)
        points = Points(layers, token_counts(tokens), routing, Variant(kind), **fields)
    heats = ("cool",) * cool + ("hot",) * hot
    if not heats:
        raise ValueError("nothing is left to time: take --cool, --hot or both")
    gpu = gpu_to_measure("bench")

    from jitmoe.bench.conditions import conditions
    from jitmoe.bench.rows import HEADER, line
    from jitmoe.bench.session import run
    from jitmoe.bench.trial import Protocol

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    start = time.perf_counter()
    facts = conditions(gpu.name, shlex.join(["jitmoe", *sys.argv[1:]]))
    say(f"{gpu.name}, driver {facts['driver']}, {facts['clocks']}; routing {routing}")
    rows = []
    measured = run(
        points, Protocol(heats, bursts), gpu, with_peers=peers, time_limit_s=time_limit, say=say
    )
    for row in measured:
        if not rows and not as_json:
            typer.echo(HEADER)
        rows.append(row | facts)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        if not as_json:
            typer.echo(line(row))
    say(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if any(row["method"] == "jitmoe" and row["status"] != "ok" for row in rows):
        raise typer.Exit(1)
