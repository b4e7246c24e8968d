"""Which layer it is beside its sizes: the activation between the GEMMs, the order of gate and up,
what multiplies tokens and sums, whether there are biases, and which experts are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from jitmoe.plan.formats import format_of
from jitmoe.plan.problem import QUANT_GROUP

# The functions there are kernels for, as the plan names them, in the order of their constants; and
# what they are called in a sentence.
FUNCTIONS = {
    "swiglu": "SwiGLU",
    "swiglu_clamped": "clamped SwiGLU",
    "geglu_tanh": "GeGLU by tanh",
    "geglu_erf": "GeGLU by erf",
    "reglu2": "squared ReGLU",
    "relu2_no_gate": "squared ReLU",
    "silu_no_gate": "SiLU",
    "gelu_tanh_no_gate": "GELU by tanh",
    "gelu_erf_no_gate": "GELU by erf",
}

# Kinds of activations: the function, and usual numbers of those that take any (alpha, limit,
# up_offset). 10 is swiglu_limit of DeepSeek-V4; 1.702, 7 and 1 are gpt-oss's.
KINDS = {
    "swiglu": ("swiglu", None),
    "swiglu_clamped": ("swiglu_clamped", (1.0, 10.0, 0.0)),
    "swiglu_oai": ("swiglu_clamped", (1.702, 7.0, 1.0)),
    "geglu_tanh": ("geglu_tanh", None),
    "geglu_erf": ("geglu_erf", None),
    "reglu2": ("reglu2", None),
    "relu2_no_gate": ("relu2_no_gate", None),
    "silu_no_gate": ("silu_no_gate", None),
    "gelu_tanh_no_gate": ("gelu_tanh_no_gate", None),
    "gelu_erf_no_gate": ("gelu_erf_no_gate", None),
}

E4M3_MAX = 448.0
MAX_NUMBER = 1e30  # the kernel's numbers are f32
MAX_FIRST_EXPERT = 1 << 30  # ids of 32 bits and negative ones stay apart
# Orders of an expert's rows in w13: gate before up, up before gate, or by turns, gate first.
GATE_UP = ("gate_first", "up_first", "interleaved")


@dataclass(frozen=True)
class Activation:
    """What an expert does with gate and up of a channel; or, without a gate, with its one sum.

    kind       swiglu          gate * sigmoid(gate) * up
               swiglu_clamped  gate * sigmoid(alpha * gate) * (up + up_offset), of gate cut off
                               above `limit` and up below -limit and above `limit`; by default
                               alpha 1, limit 10, up_offset 0 (DeepSeek-V4)
               swiglu_oai      the same function; by default 1.702, 7 and 1 (gpt-oss)
               geglu_tanh      gelu(gate) * up, with the approximation of gelu by tanh
               geglu_erf       gelu(gate) * up, with gelu(x) = x * (1 + erf(x / sqrt(2))) / 2
               reglu2          max(gate, 0)^2 * up
               relu2_no_gate, silu_no_gate, gelu_tanh_no_gate, gelu_erf_no_gate
                               the same functions of the row of w13 that a channel has alone where
                               experts have no gate: max(x, 0)^2 (Nemotron-H), x * sigmoid(x), ...
    alpha, limit, up_offset
               numbers of the clamped kinds, None for the usual ones; limit=inf cuts nothing off.
               Another number needs no other kernel

    Raises ValueError for another kind or number, and TypeError for what is no number.
    """

    kind: str = "swiglu"
    alpha: float | None = None
    limit: float | None = None
    up_offset: float | None = None

    def __post_init__(self):
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(
                f"activation must be one of {', '.join(KINDS)}, got {self.kind!r}; "
                "take the one that the model was trained with"
            )
        usual = KINDS[self.kind][1]
        for i, name in enumerate(("alpha", "limit", "up_offset")):
            got = getattr(self, name)
            if usual is None and got is not None:
                raise ValueError(
                    f"{name} must be None for {self.kind}, which takes no numbers, got {got!r}; "
                    "take swiglu_clamped or leave it out"
                )
            if usual is not None:
                number = usual[i] if got is None else _number(name, got, allows_inf=name == "limit")
                object.__setattr__(self, name, number)
        if usual is not None and self.limit <= 0:
            raise ValueError(
                f"limit must be positive, got {self.limit:g}; pass the model's, or inf for none"
            )

    @classmethod
    def of(cls, activation: Activation | str) -> Activation:
        """An activation, or that of a kind with its usual numbers."""
        return activation if isinstance(activation, Activation) else cls(activation)

    @property
    def function(self) -> str:
        """The field `activation` of a plan."""
        return KINDS[self.kind][0]

    @property
    def gated(self) -> bool:
        """Whether it is of experts with a gate: two rows of w13 to a channel."""
        return is_gated(self.function)


def is_gated(function: str) -> bool:
    """Whether experts have a gate, by the field `activation` of a plan."""
    return not function.endswith("_no_gate")


def rows_per_channel(function: str) -> int:
    """Rows of w13 to a channel between the GEMMs: gate and up, or one."""
    return 2 if is_gated(function) else 1


def _number(name: str, got, allows_inf: bool = False) -> float:
    if not isinstance(got, Real) or isinstance(got, bool):
        raise TypeError(f"{name} must be a number, got {type(got).__name__}; pass a float")
    if not (abs(got) <= MAX_NUMBER or (allows_inf and got == math.inf)):
        raise ValueError(
            f"{name} must be from {-MAX_NUMBER:g} to {MAX_NUMBER:g}{' or inf' * allows_inf}, "
            f"got {got:g}; take that of the model"
        )
    return float(got)


def check_gate_up(gate_up) -> None:
    """Raises ValueError for another order than one of GATE_UP."""
    if gate_up not in GATE_UP:
        raise ValueError(
            f"gate_up must be one of {', '.join(GATE_UP)}, got {gate_up!r}; say how the rows "
            "of w13 are ordered"
        )


def check_no_gate(gate_up: str) -> None:
    """Raises ValueError, for experts without a gate, for another order of rows than the default."""
    if gate_up != GATE_UP[0]:
        raise ValueError(
            f"gate_up must be left at {GATE_UP[0]} for experts without a gate, whose w13 has one "
            f"row to a channel, got {gate_up!r}; leave it out"
        )


def check_first_expert(first_expert) -> None:
    """Raises ValueError unless ids may begin there."""
    is_integer = isinstance(first_expert, Integral) and not isinstance(first_expert, bool)
    if not is_integer or not 0 <= first_expert <= MAX_FIRST_EXPERT:
        raise ValueError(
            f"first_expert must be an integer from 0 to {MAX_FIRST_EXPERT:,}, got "
            f"{first_expert!r}; pass the id of the first expert of w13"
        )


@dataclass(frozen=True)
class Variant:
    """What a call and its weights want beside arrays: see `mega_moe` and `ExpertWeights`, whose
    defaults these are.
    """

    activation: Activation | str = Activation()
    routed_scaling_factor: float = 1.0
    apply_router_weight_on_input: bool = False
    first_expert: int = 0
    batch_invariant: bool = False
    gate_up: str = "gate_first"
    has_bias: bool = False

    def __post_init__(self):
        factor = self.routed_scaling_factor
        for name in ("apply_router_weight_on_input", "batch_invariant"):
            got = getattr(self, name)
            if not isinstance(got, bool):
                raise TypeError(f"{name} must be True or False, got {got!r}; pass a bool")
        check_first_expert(self.first_expert)
        check_gate_up(self.gate_up)
        object.__setattr__(self, "activation", Activation.of(self.activation))
        if not self.activation.gated:
            check_no_gate(self.gate_up)
        object.__setattr__(self, "routed_scaling_factor", _number("routed_scaling_factor", factor))
        object.__setattr__(self, "first_expert", int(self.first_expert))

    @property
    def plan_fields(self) -> dict[str, str | bool]:
        """Fields of the plan: a kernel is built for each combination."""
        return {
            "activation": self.activation.function,
            "up_first": self.gate_up == "up_first",
            "weight_on_input": self.apply_router_weight_on_input,
            "interleaved": self.gate_up == "interleaved",
            "has_bias": self.has_bias,
            "batch_invariant": self.batch_invariant,
        }

    @property
    def formula(self) -> dict:
        """Arguments of `reference.mega_moe`, which takes biases themselves and knows no parts of
        tiles.
        """
        kernel_only = ("has_bias", "batch_invariant")
        return {name: value for name, value in vars(self).items() if name not in kernel_only}

    def scalars(self, format: str) -> dict[str, float | int]:
        """Parameters of the kernel, by name and in their order: any values of the same kernel, for
        weights of a format of `formats.FORMATS`.
        """
        activation, largest = self.activation, E4M3_MAX if format_of(format).quantizes else 1.0
        return {
            "alpha": 1.0 if activation.alpha is None else activation.alpha,
            "limit": math.inf if activation.limit is None else activation.limit,
            "up_offset": activation.up_offset or 0.0,
            "mid_scale_unit": self.routed_scaling_factor / largest,
            "first_expert": self.first_expert,
        }


DEFAULT = Variant()


def check_function(activation: str, up_first: bool, interleaved: bool) -> None:
    """Raises ValueError unless there are kernels for these fields of a plan."""
    if activation not in FUNCTIONS:
        raise ValueError(
            f"activation of a plan must be one of {', '.join(FUNCTIONS)}, got {activation!r}; "
            "take Activation(kind).function"
        )
    if not is_gated(activation):
        check_no_gate("up_first" if up_first else "interleaved" if interleaved else GATE_UP[0])


def function_constants(activation: str) -> dict[str, int]:
    """`activation` as a number, and the numbers of all."""
    numbers = {f"activation_{name}": number for number, name in enumerate(FUNCTIONS)}
    return {"activation": numbers[f"activation_{activation}"]} | numbers


def row_constants(plan) -> dict[str, int]:
    """What the kernel of a MegaMoePlan knows of w13's rows."""
    gated, per_channel = is_gated(plan.activation), rows_per_channel(plan.activation)
    in_halves = gated and not plan.interleaved
    return {
        "gated": int(gated),
        "w13_rows": per_channel * plan.intermediate,
        "tile_channels": plan.block_rows // per_channel,
        # A block of w13_scale can hold ends of both halves, gate and up.
        "up_block_offset": plan.intermediate // QUANT_GROUP,
        "up_block_rest": plan.intermediate % QUANT_GROUP if in_halves else 0,
    }
