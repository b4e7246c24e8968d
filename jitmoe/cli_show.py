"""`jitmoe show` of dispatch and combine: their options, and the plan that they name."""

from __future__ import annotations

from typing import Annotated

import typer

from jitmoe.cli_layer import layer_shape

KERNELS = ("mega-moe", "dispatch", "combine")

Kernel = Annotated[
    str,
    typer.Argument(help="mega-moe, dispatch or combine.", metavar="KERNEL", show_default=True),
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

_OF_TRANSFERS = "kernel", "model", "config", "hidden", "experts", "top_k"
_OF_TRANSFERS += "ranks", "layout", "format", "gpu", "plain"


def check_options(context: typer.Context, kernel: str) -> None:
    """Refuse what was given on the command line and means nothing for `kernel`."""
    if kernel not in KERNELS:
        raise ValueError(
            f"the kernel must be mega-moe, dispatch or combine, got {kernel!r}; take one of them"
        )
    given = {
        option.name: option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(option.name).name == "COMMANDLINE"
    }
    if kernel == "mega-moe":
        if wrong := [given[name] for name in ("ranks", "layout") if name in given]:
            raise ValueError(
                f"mega-moe has no {' and no '.join(wrong)}; leave out what is of dispatch and "
                "combine alone, or name one of them"
            )
    elif wrong := [option for name, option in given.items() if name not in _OF_TRANSFERS]:
        raise ValueError(
            f"{kernel} has no {', '.join(wrong)}, but a model, or --hidden, --experts and --top-k, "
            "and --ranks, --layout, --format and --gpu; leave out the rest"
        )


def transfer_plan(
    kernel: str, model, config, hidden, experts, top_k, ranks: int, layout: str, format, gpu
):
    """The plan of dispatch or combine on one of `ranks` ranks, as the public functions make it."""
    from jitmoe.plan.combine import CombinePlan
    from jitmoe.plan.dispatch import DispatchPlan

    hidden, experts, top_k = _sizes(model, config, hidden, experts, top_k)
    if not 2 <= ranks <= 64:
        raise ValueError(f"--ranks must be 2 to 64, got {ranks}; one rank keeps its tokens")
    if experts % ranks:
        raise ValueError(
            f"{experts} experts do not share out to {ranks} ranks; take --ranks that divide them"
        )
    if layout not in ("tokens", "experts"):
        raise ValueError(f"--layout must be tokens or experts, got {layout!r}; take one of them")
    if format not in (None, "bf16", "fp8"):
        raise ValueError(
            f"--format of {kernel} must be bf16 or fp8, got {format!r}; take one of them"
        )
    by_expert = layout == "experts"
    kind = DispatchPlan if kernel == "dispatch" else CombinePlan
    plan = kind(
        gpu.arch,
        hidden,
        experts // ranks,
        top_k,
        ranks,
        format or "bf16",
        by_expert,
        128 if by_expert else 1,
    )
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
