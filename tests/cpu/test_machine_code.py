"""No multiply is lost between PTX and machine code.

Where two wgmma with A in registers had the same A and the same accumulators one after the other,
ptxas (NVRTC 12.9 and 13.0) dropped the first, and put a multiply of zeros into RZ in its place.
"""

import re
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
from cuda.bindings import nvrtc as api
from example_modules import example

from jitmoe.jit import nvrtc
from jitmoe.jit.render import render
from jitmoe.plan.gpu import GPUS
from jitmoe.plan.heuristics import choose
from jitmoe.plan.problem import MAX_TOKENS, MoeProblem

NO_GATE = {"activation": "relu2_no_gate"}
BIASES = {"has_bias": True, "interleaved": True, "activation": "swiglu_clamped"}
# format, bucket, fields of the variant, of the plan
CASES = [
    ("mxfp4_fp8", "decode", {}, {}),
    ("mxfp4_fp8", "decode", {}, {"trace": True}),
    ("mxfp4_fp8", "decode", NO_GATE, {}),
    ("mxfp4_fp8", "decode", NO_GATE, {"trace": True}),
    ("mxfp4_fp8", "decode", BIASES, {}),
    ("mxfp4_fp8", "prefill", {}, {}),
    ("mxfp4_bf16", "decode", {}, {}),
    ("mxfp4_bf16", "prefill", {}, {}),
    ("mxfp4_bf16", "decode", BIASES, {"trace": True}),
]


def ptx_of(text: str) -> str:
    """By NVRTC itself, for cuda.core asks the driver what PTX it takes."""

    def checked(status, *values):
        assert not int(status), status.name
        return values[0] if values else None

    program = checked(*api.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    options = [b"-arch=compute_90a", f"-std={nvrtc.STD}".encode(), b"-default-device"]
    checked(*api.nvrtcCompileProgram(program, len(options), options))
    ptx = bytearray(checked(*api.nvrtcGetPTXSize(program)))
    checked(*api.nvrtcGetPTX(program, ptx))
    checked(*api.nvrtcDestroyProgram(program))
    return ptx.decode()


def multiplies_of_ptx(ptx: str) -> Counter:
    """By (columns, depth)."""
    shapes = re.findall(r"wgmma\.mma_async\.\S*?\.m64n(\d+)k(\d+)\.", ptx)
    return Counter((int(n), int(k)) for n, k in shapes)


def multiplies_of_code(code: str) -> list[tuple[tuple[int, int], str]]:
    """(columns, depth) and destination of each."""
    found = re.findall(r"\b[A-Z]*GMMA\.64x(\d+)x(\d+)\S*\s+(?:[A-Z]*P\w+,\s*)?(\w+)", code)
    return [((int(n), int(k)), register) for n, k, register in found]


def name_of(case) -> str:
    format, bucket, variant, fields = case
    said = [*variant.values(), *fields]
    return "-".join([format, bucket, *map(str, said)])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_no_multiply_is_lost(case, tmp_path):
    try:
        nvdisasm = example("16_ncu_samples").disassembler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    format, bucket, variant, fields = case
    num_tokens, gated = {"decode": 1, "prefill": MAX_TOKENS}[bucket], variant is not NO_GATE
    problem = MoeProblem(num_tokens, 512, 288, 12, 2, format, gated)
    plan = replace(choose(problem, GPUS["h200"], **variant), **fields)
    assert plan.bucket == bucket
    text = render(plan)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(nvrtc.compile(text, plan.arch, plan.name).data)
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    made, wanted = multiplies_of_code(done.stdout), multiplies_of_ptx(ptx_of(text))
    assert len(made) == done.stdout.count("GMMA.") > 0, "all are read"
    assert all(register != "RZ" for _, register in made)
    assert Counter(shape for shape, _ in made) == wanted
