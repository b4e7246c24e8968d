"""What jitmoe decides for a layer and the CUDA it writes for it. Runs anywhere, no GPU needed."""

from rich.console import Console

from jitmoe.jit.render import render
from jitmoe.plan.gpu import gpu_spec
from jitmoe.plan.heuristics import choose
from jitmoe.plan.models import model_shape
from jitmoe.report import plan_report, print_plan

gpu = gpu_spec("h200")
shape = model_shape("qwen3-30b-a3b")
for num_tokens in (8, 8192):
    layer = shape.problem(num_tokens)
    print_plan(Console(), shape.name, plan_report(layer, gpu))
    print()

# The count is a run-time parameter: one text serves every token count of a bucket.
decode = choose(shape.problem(8), gpu)
assert decode == choose(shape.problem(9), gpu)
text = render(decode)
num_lines = len(text.splitlines())
print(f"{num_lines} lines of CUDA, no #include. At their end the kernel itself:\n")
print(text[text.index('extern "C"') :])
