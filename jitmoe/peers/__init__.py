"""Other implementations of the layer, by name; each file has three names.

PEER        what it is called and how exact its recipe is
available   () -> why it cannot be run here, or None
prepare     (weights) -> call: `weights`, torch tensors in the order of `reference.Layer`, brought
            into the peer's own layout once; call(x, x_scale, topk_ids, topk_weights) -> y bf16
            [num_tokens, hidden] enqueues on torch's current stream and may be captured

x is e4m3 [num_tokens, hidden], x_scale f32 [num_tokens, hidden / 128], topk_ids int32 and
topk_weights f32 [num_tokens, top_k]; the id -1 is an unused slot. With bf16 weights, x is bf16 and
all scales are None.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

FILES = ("sgl_mega_moe", "torch_scaled_grouped_mm", "torch_grouped_mm", "transformers_grouped_mm")


def peers() -> Iterator[ModuleType]:
    """Every peer's file, whether it can be run here or not."""
    for file in FILES:
        yield importlib.import_module(f"{__name__}.{file}")
