"""A shared expert in the same launch: further experts, in slots that every token has.

A shared expert as wide as the routed ones is one expert more, one of n times their width is n: the
activation knows channels alone, so its rows of w13 and columns of w2 may be cut anywhere (in whole
blocks of scales). Runs anywhere: on a small layer, the kernel emulated on this CPU.
"""

import numpy as np

from jitmoe import ExpertWeights, fp8, mega_moe, reference

ROUTED, SHARED, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 6, 2, 256, 128, 2, 24


def cut(layer: reference.Layer, num: int) -> reference.Layer:
    """One expert as `num` experts, each with its share of the channels between the GEMMs."""

    def rows(part):  # of gate and of up: [1, 2 * num * n, k] -> [num, 2 * n, k]
        gate_up = part.reshape(2, num, -1, part.shape[2])
        return gate_up.transpose(1, 0, 2, 3).reshape(num, -1, part.shape[2])

    def columns(part):
        return np.concatenate(np.split(part, num, axis=2))

    return reference.Layer(
        rows(layer.w13), rows(layer.w13_scale), columns(layer.w2), columns(layer.w2_scale)
    )


routed = reference.random_layer(ROUTED, HIDDEN, INTERMEDIATE, seed=1)
shared = reference.random_layer(1, HIDDEN, SHARED * INTERMEDIATE, seed=2)
tokens = reference.random_tokens(TOKENS, HIDDEN, ROUTED, TOP_K, seed=3)

# Once, where the model is loaded.
w13, w13_scale, w2, w2_scale = (
    np.concatenate(parts) for parts in zip(routed, cut(shared, SHARED), strict=True)
)
weights = ExpertWeights(w13, w2, w13_scale, w2_scale)

# In every call. A router that writes into wider arrays has nothing to copy.
every = np.broadcast_to(np.arange(ROUTED, ROUTED + SHARED, dtype=np.int32), (TOKENS, SHARED))
topk_ids = np.concatenate([tokens.topk_ids, every], axis=1)
topk_weights = np.concatenate([tokens.topk_weights, np.ones_like(every, np.float32)], axis=1)
x = fp8.encode_bf16(tokens.x)
y = mega_moe(x, topk_ids, topk_weights, weights, backend="emulated")

# By themselves: the routed experts, and the shared one with a weight of 1.
ids = np.zeros((TOKENS, 1), np.int32)
ref = reference.mega_moe(x, None, *tokens[1:], *routed, requantize=True)
ref += reference.mega_moe(x, None, ids, np.ones((TOKENS, 1), np.float32), *shared, requantize=True)
error = reference.relative_error(y, ref)
print(f"{ROUTED} routed experts and one shared of {SHARED} times their width: error {error:.1e}")
assert error < 5e-3
