"""How every command names a layer: the options, and the shape they mean."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Option(help="A preset, such as deepseek-v3.")]
Config = Annotated[
    Path | None, typer.Option(help="A Hugging Face config.json, or the folder that holds one.")
]
Hidden = Annotated[int | None, typer.Option(help="Channels of a token.")]
Intermediate = Annotated[int | None, typer.Option(help="Channels of an expert between its GEMMs.")]
Experts = Annotated[int | None, typer.Option(help="Experts of a layer, over all ranks.")]
TopK = Annotated[int | None, typer.Option(help="Experts a token is routed to.")]
Ep = Annotated[int, typer.Option(help="Ranks that share the experts.")]
Activation = Annotated[
    str | None,
    typer.Option(
        help="swiglu, swiglu_clamped, swiglu_oai, geglu_tanh, geglu_erf, reglu2, or of experts "
        "without a gate relu2_no_gate, silu_no_gate, gelu_tanh_no_gate or gelu_erf_no_gate; "
        "default: the model's."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        help="Of the weights: fp8_block, fp8_channel, fp8_tensor, bf16, mxfp4_fp8 or mxfp4_bf16; "
        "default: the model's, or fp8_block."
    ),
]
GateUp = Annotated[
    str | None,
    typer.Option(
        help="Order of rows in w13: gate_first, up_first or interleaved; default: the model's."
    ),
]
WeightOnInput = Annotated[
    bool, typer.Option("--weight-on-input", help="Router weights multiply tokens, not sums.")
]
Bias = Annotated[bool, typer.Option("--bias", help="Experts have biases; a model brings them.")]
Ranks = Annotated[
    int,
    typer.Option(
        min=1, max=8, help="Ranks of the call; --tokens are each one's, experts those of all."
    ),
]
Presum = Annotated[
    bool, typer.Option("--presum/--no-presum", help="Ranks sum a token's rows before they travel.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def layer_shape(model, config, hidden, intermediate, experts, top_k, activation=None):
    """The ModelShape that the options name, from exactly one of the three sources, with its own
    activation or another.
    """
    shape = _shape(model, config, hidden, intermediate, experts, top_k)
    return shape if activation is None else replace(shape, activation=activation)


def _shape(model, config, hidden, intermediate, experts, top_k):
    from jitmoe.plan import models

    sizes = {
        "--hidden": hidden,
        "--intermediate": intermediate,
        "--experts": experts,
        "--top-k": top_k,
    }
    given = [name for name, size in sizes.items() if size is not None]
    if (model is not None) + (config is not None) + bool(given) != 1:
        raise ValueError(
            "name the layer in one way: --model, or --config, or --hidden, --intermediate, "
            "--experts and --top-k"
        )
    if model is not None:
        return models.model_shape(model)
    if config is not None:
        return models.from_config(config)
    if missing := [name for name in sizes if name not in given]:
        raise ValueError(f"a layer by its sizes needs {', '.join(missing)} too")
    return models.ModelShape("layer", hidden, intermediate, experts, top_k, "command line")


def layer_variant(shape, gate_up: str | None, weight_on_input: bool, bias: bool):
    """The Variant that the options name, and the shape's where they name none."""
    from jitmoe.plan import variant

    return variant.Variant(
        shape.activation,
        apply_router_weight_on_input=weight_on_input,
        gate_up=shape.gate_up if gate_up is None else gate_up,
        has_bias=bias or shape.has_bias,
    )


def shares(ep: int, ranks: int) -> int:
    """How many shares of the experts there are, of which each rank of a call has one."""
    if ranks > ep > 1:
        raise ValueError(
            f"--ranks must be up to the {ep} ranks of --ep, got {ranks}; leave --ep out to share "
            "the experts out to all of them"
        )
    return max(ep, ranks)


def rank_fields(ranks: int, presum: bool) -> dict:
    """Fields of a plan."""
    if ranks == 1 and presum:
        raise ValueError("--presum is of many ranks, got one; take --ranks too")
    return {"num_ranks": ranks, "presum": presum}


def title(shape, ep: int, ranks: int = 1) -> str:
    if ranks > 1:
        return f"{shape.name}, {ranks} ranks{f' of {ep}' * (ep > ranks)}"
    return f"{shape.name}, one rank of {ep}" if ep > 1 else shape.name


def gpu_to_measure(command: str):
    """The GPU to measure. Ends the program with a sentence where there is none to measure."""
    from jitmoe.run.driver import device_spec, num_devices

    reason = None
    if num_devices() == 0:
        reason = (
            f"no GPU here; {command} needs an H100, H200 or H20 (jitmoe plan prints floors without)"
        )
    elif find_spec("cupy") is None:
        reason = "CuPy is not installed: pip install 'jitmoe[cu12]' or 'jitmoe[cu13]'"
    else:
        try:
            return device_spec(0)
        except ValueError as error:
            reason = str(error)
    typer.echo(f"jitmoe: {reason}", err=True)
    raise typer.Exit(1)
