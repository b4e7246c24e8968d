"""`jitmoe show` of dispatch and combine, also between nodes: their options, and the plan that they
name.
"""

from __future__ import annotations

from typing import Annotated

import typer

from jitmoe.cli_layer import layer_shape

HYBRID = ("hybrid-dispatch", "hybrid-combine")
KERNELS = ("mega-moe", "dispatch", "combine", *HYBRID)
_LIST = f"{', '.join(KERNELS[:-1])} or {KERNELS[-1]}"

Kernel = Annotated[
    str,
    typer.Argument(
        help=f"{_LIST}; hybrid kernels are those between nodes.",
        metavar="KERNEL",
        show_default=True,
    ),
]
ShowFormat = Annotated[
    str | None,
    typer.Option(
        help="Of the weights: fp8_block, fp8_channel, fp8_tensor, bf16, mxfp4_fp8 or mxfp4_bf16; "
        "default: the model's, or fp8_block. Of dispatch's rows: bf16 (default) or fp8."
    ),
]
ShowRanks = Annotated[
    int, typer.Option(help="Ranks of dispatch and combine, 2 to 64; --experts are those of all.")
]
Layout = Annotated[
    str, typer.Option(help="Of dispatch's rows: tokens, or experts, which sorts them by expert.")
]

Nodes = Annotated[
    int, typer.Option(help="Nodes of hybrid-dispatch and hybrid-combine, of as many ranks each.")
]
ShowRail = Annotated[
    str,
    typer.Option(
        help="How their nodes send to each other: memory (that this GPU reaches), delayed (the "
        "same, late and out of order, to test with) or gin (NCCL's network transport)."
    ),
]

_OF_NODES = "nodes", "rail"
_OF_TRANSFERS = "kernel", "model", "config", "hidden", "experts", "top_k"
_OF_TRANSFERS += "ranks", "layout", "format", "gpu", "plain"


def check_options(context: typer.Context, kernel: str) -> None:
    """Refuse what was given on the command line and means nothing for `kernel`."""
    if kernel not in KERNELS:
        raise ValueError(f"the kernel must be {_LIST}, got {kernel!r}; take one of them")
    given = {
        option.name: option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(option.name).name == "COMMANDLINE"
    }
    if kernel == "mega-moe":
        others = ("ranks", "layout", *_OF_NODES)
        if wrong := [given[name] for name in others if name in given]:
            raise ValueError(
                f"mega-moe has no {' and no '.join(wrong)}; leave out what is of dispatch and "
                "combine alone, or name one of them"
            )
        return
    of_nodes = _OF_NODES if kernel in HYBRID else ()
    taken = *_OF_TRANSFERS, *of_nodes
    if wrong := [option for name, option in given.items() if name not in taken]:
        also = "".join(f" --{name}," for name in of_nodes)
        raise ValueError(
            f"{kernel} has no {', '.join(wrong)}, but a model, or --hidden, --experts and --top-k, "
            f"and --ranks,{also} --layout, --format and --gpu; leave out the rest"
        )


def transfer_plan(
    kernel: str,
    model,
    config,
    hidden,
    experts,
    top_k,
    ranks: int,
    nodes: int,
    rail: str,
    layout: str,
    format,
    gpu,
):
    """The plan of dispatch or combine on one of `ranks` ranks, as the public functions make it."""
    from jitmoe.plan.hybrid import MAX_NODES, RAILS
    from jitmoe.plan.transfer_pairs import combine_of, dispatch_plan

    hidden, experts, top_k = _sizes(model, config, hidden, experts, top_k)
    if not 2 <= ranks <= 64:
        raise ValueError(f"--ranks must be 2 to 64, got {ranks}; one rank keeps its tokens")
    if experts % ranks:
        raise ValueError(
            f"{experts} experts do not share out to {ranks} ranks; take --ranks that divide them"
        )
    if kernel not in HYBRID:
        nodes = 1
    elif not 2 <= nodes <= MAX_NODES or ranks % nodes:
        raise ValueError(
            f"--nodes must be 2 to {MAX_NODES} and divide the {ranks} --ranks, got {nodes}; for "
            f"one node take {kernel.removeprefix('hybrid-')}"
        )
    if rail not in RAILS:
        raise ValueError(f"--rail must be {', '.join(RAILS)}, got {rail!r}; take one of them")
    if layout not in ("tokens", "experts"):
        raise ValueError(f"--layout must be tokens or experts, got {layout!r}; take one of them")
    if format not in (None, "bf16", "fp8"):
        raise ValueError(
            f"--format of {kernel} must be bf16 or fp8, got {format!r}; take one of them"
        )
    by_expert = layout == "experts"
    plan = dispatch_plan(
        gpu.arch,
        hidden,
        experts // ranks,
        top_k,
        ranks,
        format or "bf16",
        by_expert,
        128 if by_expert else 1,
        num_nodes=nodes,
        rail=rail,
    )
    if kernel.endswith("combine"):
        plan = combine_of(plan)
    plan.check(gpu)
    return plan


def _sizes(model, config, hidden, experts, top_k) -> tuple[int, int, int]:
    sizes = {"--hidden": hidden, "--experts": experts, "--top-k": top_k}
    missing = [name for name, size in sizes.items() if size is None]
    if (model is not None) + (config is not None) + (len(missing) < 3) != 1:
        raise ValueError(
            "name the layer in one way: --model, or --config, or --hidden, --experts and --top-k"
        )
    if len(missing) == 3:
        shape = layer_shape(model, config, *[None] * 4)
        return shape.hidden, shape.num_experts, shape.top_k
    if missing:
        raise ValueError(f"a layer by its sizes needs {', '.join(missing)} too")
    return hidden, experts, top_k
