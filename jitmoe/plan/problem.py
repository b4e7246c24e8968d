"""MoeProblem: what the caller wants computed, validated once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral

from jitmoe.plan.formats import format_of

MAX_TOKENS = 262_144
MAX_EXPERTS = 1_024
MAX_TOP_K = 32
MAX_RANKS = 64  # of a group
MAX_HIDDEN = 16_384
MAX_INTERMEDIATE = 32_768
MX_GROUP = 32  # weights of a row that share a scale in MXFP4
QUANT_GROUP = 128  # channels that share one activation scale; also the side of a weight scale block


@dataclass(frozen=True)
class MoeProblem:
    """One mixture-of-experts layer call.

    num_tokens    rows of x (0 to 262,144)
    hidden        columns of x, a multiple of 128 (bf16: of 16; MXFP4: of 32) up to 16,384
    intermediate  channels of an expert between its two GEMMs, a multiple of 16 (MXFP4: of 32) up to
                  32,768
    num_experts   experts held here, 1 to 1,024
    top_k         slots a token has, 1 to 32
    format        of the weights: one of formats.FORMATS
    gated         whether w13 holds gate and up, or the one row to a channel of experts without gate

    Raises ValueError with got, allowed and remedy.
    """

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    format: str = "fp8_block"
    gated: bool = True

    def __post_init__(self):
        _check_range(
            "num_tokens", self.num_tokens, 0, MAX_TOKENS, "split the batch over several calls"
        )
        _check_range(
            "num_experts", self.num_experts, 1, MAX_EXPERTS, "shard the experts over ranks"
        )
        _check_range(
            "top_k", self.top_k, 1, MAX_TOP_K, "split the slots over two calls and add the results"
        )
        form = format_of(self.format)
        _check_multiple("hidden", self.hidden, form.hidden_step, MAX_HIDDEN)
        _check_multiple("intermediate", self.intermediate, form.intermediate_step, MAX_INTERMEDIATE)
        if not isinstance(self.gated, bool):
            raise TypeError(f"gated must be True or False, got {self.gated!r}; pass a bool")
        for field in fields(self):  # a NumPy integer would overflow in the products below
            if field.name not in ("format", "gated"):
                object.__setattr__(self, field.name, int(getattr(self, field.name)))

    @property
    def num_pairs(self) -> int:
        """Routed (token, expert) pairs when every slot is used."""
        return self.num_tokens * self.top_k

    @property
    def num_active_experts(self) -> float:
        """Expected experts hit when every token draws top_k distinct experts uniformly."""
        share = min(1.0, self.top_k / self.num_experts)
        return self.num_experts * (1.0 - (1.0 - share) ** self.num_tokens)

    @property
    def tokens_per_active_expert(self) -> float:
        return self.num_pairs / self.num_active_experts if self.num_tokens else 0.0

    @property
    def w13_rows(self) -> int:
        """Rows of an expert's w13: gate and up of every channel, or one."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights and scales."""
        blocks = _blocks(self.w13_rows) * _blocks(self.hidden)
        blocks += _blocks(self.hidden) * _blocks(self.intermediate)
        channels = self.w13_rows + self.hidden
        form = format_of(self.format)
        weights = self.hidden * (self.w13_rows + self.intermediate)
        scale_bytes = {
            None: 0,
            "block": 4 * blocks,
            "channel": 4 * channels,
            "tensor": 8,
            "mx": weights // MX_GROUP,
        }
        return form.weight_bytes(weights) + scale_bytes[form.scales]

    @property
    def activation_bytes(self) -> int:
        """Bytes of x (in FP8 with its scales), ids, router weights and y."""
        x = format_of(self.format).element_bytes * self.hidden
        if format_of(self.format).quantizes:
            x += 4 * self.hidden // QUANT_GROUP
        return self.num_tokens * (x + 8 * self.top_k + 2 * self.hidden)

    @property
    def flop(self) -> int:
        """Floating-point operations of the two GEMMs (a multiply-add is two)."""
        return self.num_pairs * self.pair_flop

    @property
    def pair_flop(self) -> int:
        """Those of one routed pair."""
        return 2 * self.hidden * (self.w13_rows + self.intermediate)


def _blocks(channels: int) -> int:
    return -(-channels // QUANT_GROUP)


def _check_range(name, got, low, high, remedy):
    if not _is_integer(got) or not low <= got <= high:
        raise ValueError(
            f"{name} must be an integer from {low} to {high:,}, got {_show(got)}; {remedy}"
        )


def _check_multiple(name, got, step, high):
    if not _is_integer(got) or not step <= got <= high or got % step:
        too_large = _is_integer(got) and got > high
        remedy = "shard the layer" if too_large else "pad the weights with zeros to a multiple"
        raise ValueError(
            f"{name} must be a multiple of {step} up to {high:,}, got {_show(got)}; {remedy}"
        )


def _is_integer(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _show(value) -> str:
    return f"{value:,}" if _is_integer(value) else repr(value)
