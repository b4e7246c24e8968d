"""One mixture-of-experts layer on a Hopper GPU, checked against the oracle.

    python examples/02_first_layer.py

Without a GPU it says so and stops.
"""

import sys

from jitmoe import ExpertWeights, mega_moe, reference
from jitmoe.fp8 import encode_bf16, quantize_tokens
from jitmoe.run.driver import num_devices

if num_devices() == 0:
    print("no GPU here; this example needs an H100, H200 or H20")
    sys.exit()

import cupy  # noqa: E402

from jitmoe.measure import oracle_namespace  # noqa: E402

xp = oracle_namespace()
num_tokens, hidden, intermediate, num_experts, top_k = 64, 2048, 768, 128, 8

# A checkpoint's tensors: e4m3 codes with one f32 scale per 128 x 128 block. They are used in place.
layer = reference.random_layer(num_experts, hidden, intermediate, seed=0, xp=cupy)
weights = ExpertWeights(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)

tokens = reference.random_tokens(num_tokens, hidden, num_experts, top_k, seed=1, xp=cupy)
x = encode_bf16(tokens.x, cupy)  # CuPy before 14 has no bf16: its bits are as good
y = mega_moe(x, tokens.topk_ids, tokens.topk_weights, weights)  # one launch
cupy.cuda.get_current_stream().synchronize()

# The same from e4m3 activations, as a model that quantises before it has them.
codes, scale = quantize_tokens(tokens.x, cupy)
y_fp8 = mega_moe((codes, scale), tokens.topk_ids, tokens.topk_weights, weights)

args = (codes, scale, tokens.topk_ids, tokens.topk_weights, *layer)
exact = reference.mega_moe(*args, requantize=False, xp=xp)
as_kernel = reference.mega_moe(*args, requantize=True, xp=xp)
for name, result in (("bf16 x", y), ("fp8 x", y_fp8)):
    bits = result.view(cupy.uint16)
    error = reference.relative_error(bits, exact, xp)
    rounded = reference.relative_error(bits, as_kernel, xp)
    print(f"{name}: relative error {error:.2e}; to an oracle that rounds as well {rounded:.2e}")
    assert error < 2.6e-2 and rounded < 5e-3
