"""The layer as a PyTorch operator: compiled by torch.compile, then captured into a CUDA graph.

    python examples/05_torch.py

Needs the torch extra and a Hopper GPU; without them it says so and stops.
"""

import sys
from importlib.util import find_spec

from jitmoe.run.driver import num_devices

if find_spec("torch") is None:
    print("no PyTorch here; pip install '.[cu13,torch]'")
    sys.exit()
if num_devices() == 0:
    print("no GPU here; this example needs an H100, H200 or H20")
    sys.exit()

import torch  # noqa: E402

from jitmoe.integrations.torch import mega_moe  # noqa: E402

num_tokens, hidden, intermediate, num_experts, top_k = 64, 2048, 768, 32, 8
torch.manual_seed(0)
torch.set_default_device("cuda")


def random_weights(rows, cols):
    """e4m3 codes [num_experts, rows, cols] and one f32 scale for each block of 128 x 128."""
    codes = torch.randn(num_experts, rows, cols).to(torch.float8_e4m3fn)
    return codes, torch.full((num_experts, rows // 128, cols // 128), cols**-0.5)


w13, w13_scale = random_weights(2 * intermediate, hidden)  # gate rows, then up rows
w2, w2_scale = random_weights(hidden, intermediate)


def block(x, scores):
    topk_weights, topk_ids = scores.softmax(-1).topk(top_k)
    return x + mega_moe(x, topk_ids, topk_weights, w13, w2, w13_scale, w2_scale)


x = torch.randn(num_tokens, hidden, dtype=torch.bfloat16)
scores = torch.randn(num_tokens, num_experts)
compiled = torch.compile(block, fullgraph=True)

# A graph's memory and kernels must be there before: one call on the stream of the capture.
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    eager, warm = block(x, scores), compiled(x, scores)
with torch.cuda.graph(graph, stream=stream):
    y = compiled(x, scores)
graph.replay()
torch.cuda.synchronize()

wanted = eager.float()
for name, result in (("compiled", warm), ("compiled, replayed", y)):
    error = (result.float() - wanted).norm() / wanted.norm()
    print(f"{name}: relative difference to eager {error:.1e}")
    assert error < 1e-2
