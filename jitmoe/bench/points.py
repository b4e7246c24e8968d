"""What is measured: layers by name, token counts, routing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import DEFAULT, Variant
from jitmoe.reference import ROUTINGS

SHAPES = {
    "S1": MoeProblem(0, 7168, 2048, 32, 8),  # DeepSeek-V3, one rank of EP8
    "S2": MoeProblem(0, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "S3": MoeProblem(0, 4096, 14336, 8, 2),  # Mixtral-8x7B
    "S4": MoeProblem(0, 4096, 2048, 32, 6),  # DeepSeek-V4-Flash-like, one rank of EP8
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
ZIPF_EXPONENT = 1.2


@dataclass(frozen=True)
class Points:
    """Every layer at every token count.

    layers      name -> problem; its num_tokens is ignored
    tokens      token counts, each at least 1
    routing     one of `reference.ROUTINGS`; zipf has the exponent `ZIPF_EXPONENT`
    variant     of all layers
    num_ranks   more than one: a layer is a rank's share, and tokens are each rank's
    presum      as in `mega_moe`

    Raises ValueError for a routing that a layer cannot have.
    """

    layers: dict[str, MoeProblem]
    tokens: tuple[int, ...] = TOKENS
    routing: str = "uniform"
    variant: Variant = DEFAULT
    num_ranks: int = 1
    presum: bool = False

    def __post_init__(self):
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {self.routing!r}")
        for name, layer in self.layers.items():
            all_experts = self.num_ranks * layer.num_experts
            if layer.top_k > all_experts and self.routing != "duplicates":
                raise ValueError(
                    f"routing {self.routing} needs top_k up to the {all_experts} experts of "
                    f"{name}, got {layer.top_k}; take duplicates"
                )
            for num_tokens in self.tokens:
                self.whole(layer, num_tokens)  # refuses sizes there is no kernel for

    def whole(self, layer: MoeProblem, num_tokens: int) -> MoeProblem:
        """All ranks' experts and tokens."""
        return replace(
            layer,
            num_experts=self.num_ranks * layer.num_experts,
            num_tokens=self.num_ranks * num_tokens,
        )

    def __len__(self) -> int:
        return len(self.layers) * len(self.tokens)


def named_shapes(
    names: str, format: str = "fp8_block", gated: bool = True
) -> dict[str, MoeProblem]:
    """Of "S1,S4" the shapes of those names, of weights in a format of `plan.formats.FORMATS` and
    of experts with a gate or without. Raises ValueError for another name.
    """
    keys = [name.strip().upper() for name in names.split(",")]
    for key in keys:
        if key not in SHAPES:
            raise ValueError(f"shapes must be of {', '.join(SHAPES)}, got {key!r} in {names!r}")
    return {key: replace(SHAPES[key], format=format, gated=gated) for key in keys}


def token_counts(text: str) -> tuple[int, ...]:
    """Of "1,8,32" the counts. Raises ValueError for what is no positive integer."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"tokens must be positive integers with commas between, got {text!r}")
    return tuple(map(int, parts))


def calls_per_graph(num_tokens: int) -> int:
    """Calls in one CUDA graph, each with tokens, routing and output of its own."""
    return 8 if num_tokens <= 128 else 4 if num_tokens <= 512 else 2
