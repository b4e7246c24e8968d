"""Scales of FP8 codes: which kind an array of them is, and the strides that the kernel reads at."""

from __future__ import annotations

from collections.abc import Sequence

from jitmoe.plan.formats import SCALES
from jitmoe.plan.memory_map import ceil_div
from jitmoe.plan.problem import QUANT_GROUP


def check_scales(scales) -> None:
    """Raises ValueError for another kind of weight scales than one of SCALES."""
    if scales not in SCALES:
        raise ValueError(
            f"scales must be one of {', '.join(SCALES)}, got {scales!r}; say what has a scale of "
            "its own in the weights"
        )


def kind_of(
    w13_scale: tuple[int, ...],
    w2_scale: tuple[int, ...],
    num_experts: int,
    hidden: int,
    intermediate: int,
    kinds: Sequence[str] = SCALES,
    gated: bool = True,
) -> str:
    """The first of `kinds` that weight scales of these two shapes are both of, of experts with a
    gate or without. Raises ValueError where they are of none, or of different ones.
    """
    sizes = {
        "w13_scale": (num_experts, intermediate * (2 if gated else 1), hidden),
        "w2_scale": (num_experts, hidden, intermediate),
    }
    fitting = []
    for (name, size), shape in zip(sizes.items(), (w13_scale, w2_scale), strict=True):
        halves = gated and name == "w13_scale"
        allowed = {kind: _weight_shapes(kind, *size, halves) for kind in kinds}
        fitting.append([kind for kind in kinds if tuple(shape) in allowed[kind]])
        if not fitting[-1]:
            shapes = " or ".join(f"{list(allowed[kind][0])} ({_EACH[kind]})" for kind in kinds)
            raise ValueError(
                f"{name} must have shape {shapes}, got {list(shape)}; "
                "count blocks that are cut off at an end, or take weights quantised so"
            )
    both = [kind for kind in fitting[0] if kind in fitting[1]]
    if not both:
        raise ValueError(
            f"w13_scale has scales for each {fitting[0][0]} and w2_scale for each {fitting[1][0]}; "
            "expand one of them, so that both are of a kind"
        )
    return both[0]


_EACH = {"block": "128 x 128 blocks", "channel": "output channels", "tensor": "experts"}


def _weight_shapes(kind, num_experts, rows, cols, halves) -> list[tuple[int, ...]]:
    """Those of scales for weights [num_experts, rows, cols], the usual first."""
    if kind == "block":
        return [(num_experts, ceil_div(rows, QUANT_GROUP), ceil_div(cols, QUANT_GROUP))]
    if kind == "channel":
        return [(num_experts, rows), (num_experts, rows, 1)]
    one = [(num_experts,), (num_experts, 1), (num_experts, 1, 1)]
    return one + [(num_experts, 2), (num_experts, 2, 1)] * halves


def weight_strides(
    kind: str | None, w13_scale, w2_scale, intermediate: int, interleaved: bool
) -> dict[str, int]:
    """Parameters of the kernel, by name and in their order, in units of the strides of two arrays
    of scales of a kind: from expert to expert, from one block of rows or channel to the next, and
    from gate to up, unless they are of blocks. Zeros where the kind is None, or "mx", whose scales
    are packed.
    """
    names = ["w13_scale_expert", "w2_scale_expert", "w13_scale_row", "w2_scale_row"]
    packed = kind in (None, "mx")
    s13, s2 = ((0, 0), (0, 0)) if packed else (w13_scale.strides, w2_scale.strides)
    if kind == "tensor":
        rows = 0, 0, s13[1] if tuple(w13_scale.shape[1:2]) == (2,) else 0
    elif kind == "channel":
        channel, half = (2, 1) if interleaved else (1, intermediate)
        rows = channel * s13[1], s2[1], half * s13[1]
    else:
        rows = s13[1], s2[1]
    names += ["w13_scale_half"] * (len(rows) == 3)
    strides = s13[0], s2[0], *rows
    return {f"{name}_stride": stride for name, stride in zip(names, strides, strict=True)}


def token_strides(shape, strides, num_tokens: int, hidden: int) -> tuple[int, int]:
    """From token to token and from group to group of 128 channels, in units of `strides`: of scales
    for each, for each token, or one for all. Raises ValueError for other shapes.
    """
    shape, groups = tuple(shape), ceil_div(hidden, QUANT_GROUP)
    if shape == (num_tokens, groups):
        return tuple(strides)
    if shape in ((num_tokens,), (num_tokens, 1)):
        return strides[0], 0
    if shape in ((), (1,)):
        return 0, 0
    raise ValueError(
        f"x_scale must have shape [{num_tokens}, {groups}], [{num_tokens}] or [1], "
        f"got {list(shape)}; pass one scale for each token and 128 channels, for each token, or "
        "for all"
    )
