"""What is read off ptxas: counts, and the remarks that fail a build, from bad kernels."""

import pytest
from tiny_plan import TinyPlan

from jitmoe.jit import nvrtc
from jitmoe.jit.nvrtc import CompileError, Resources, parse_log

PLAN = TinyPlan("sm_90a")
GOOD = 'extern "C" __global__ void good(float* p) { p[threadIdx.x] *= 2; }'
MMA = """
__device__ __forceinline__ void mma(float (&d)[4], unsigned long long a, unsigned long long b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 1, 0;"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#define WAIT asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
extern "C" __global__ void __launch_bounds__(128) f(float* p, unsigned long long a, int n) {
    float d[4] = {p[0], p[1], p[2], p[3]};
    BODY
    p[threadIdx.x] = d[0] + d[1];
}
"""
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* p) {
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = p[threadIdx.x + i * 1024];
    for (int k = 0; k < p[0]; ++k) {
#pragma unroll
        for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i * 7 + 1) % 64] + k;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) p[threadIdx.x + i * 1024] = v[i];
}
"""
BAD = {
    "C7508": (
        'extern "C" __global__ void f(float* p) {'
        'asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); p[0] = 1; }',
        "'setmaxnreg' ignored; unable to determine register count at entry",
    ),
    "C7506": (
        'extern "C" __global__ void __launch_bounds__(384, 1) f(float* p, float (*q)(float*)) {'
        'asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); p[0] = q(p); }',
        "'setmaxnreg' ignored to maintain compatibility",
    ),
    "C7511": (
        MMA.replace("BODY", "mma(d, a, a); d[0] += 1; mma(d, a, a); COMMIT WAIT"),
        "wgmma.mma_async instructions are serialized",
    ),
    "C7514": (
        MMA.replace(
            "BODY",
            "FENCE for (int i = 0; i < n; ++i) { if (p[i] > 0) { mma(d, a, a); }"
            "if (p[i + n] > 1) { COMMIT } if (p[i + 3 * n] > 2) { WAIT d[0] += 1; } }",
        ),
        "wgmma.mma_async instructions are serialized",
    ),
    "C7517": (
        MMA.replace("BODY", "FENCE mma(d, a, a); COMMIT p[300] = d[0]; WAIT"),
        "is injected in around line",  # `warpgroup.wait` or, since NVRTC 13, `wgmma.wait_group`
    ),
}


def test_a_good_kernel_has_nothing_to_remark():
    cubin = nvrtc.compile(GOOD, "sm_90a", "good.cu")
    resources = cubin.resources
    assert 0 < resources.num_regs <= 32
    assert resources == Resources(num_regs=resources.num_regs)
    resources.check(PLAN)
    assert "\0" not in cubin.log


def test_a_good_wgmma_has_nothing_to_remark():
    text = MMA.replace("BODY", "FENCE mma(d, a, a); COMMIT WAIT")
    nvrtc.compile(text, "sm_90a", "mma.cu").resources.check(PLAN)


def test_barriers_and_shared_memory_are_counted():
    text = """extern "C" __global__ void f(float* p) {
        __shared__ float s[256];
        s[threadIdx.x] = p[threadIdx.x];
        __syncthreads();
        asm volatile("bar.sync 3, 64;" ::: "memory");
        p[threadIdx.x] = s[255 - threadIdx.x];
    }"""
    resources = nvrtc.compile(text, "sm_90a", "smem.cu").resources
    assert resources.static_smem_bytes == 1024
    assert resources.num_barriers == 4  # the highest used, and one


def test_spills_fail():
    cubin = nvrtc.compile(SPILL, "sm_90a", "spill.cu")
    resources = cubin.resources
    assert resources.num_regs == 32
    assert min(resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) > 0
    with pytest.raises(CompileError) as caught:
        resources.check(PLAN, cubin.log, "/somewhere/spill.cu")
    error = caught.value
    assert (error.log, error.source) == (cubin.log, "/somewhere/spill.cu")
    for part in ("TinyPlan(arch='sm_90a'", "registers spill", "/somewhere/spill.cu", "ptxas info"):
        assert part in str(error), part


def test_spills_fail_again():
    """A log that is missing when the same text is compiled anew would let the kernel pass."""
    for _ in range(2):
        cubin = nvrtc.compile(SPILL, "sm_90a", "spill.cu")
        with pytest.raises(CompileError, match="registers spill"):
            cubin.resources.check(PLAN, cubin.log)


def test_a_log_that_does_not_tell_fails():
    with pytest.raises(CompileError, match="no count of registers"):
        parse_log("ptxas info    : 0 bytes gmem\n").check(PLAN)


@pytest.mark.parametrize("code", BAD)
def test_performance_remarks_fail(code):
    text, sentence = BAD[code]
    cubin = nvrtc.compile(text, "sm_90a", "bad.cu")
    assert any(code in line and sentence in line for line in cubin.resources.messages), cubin.log
    with pytest.raises(CompileError, match=code):
        cubin.resources.check(PLAN, cubin.log)


# Other spellings: nvcc's, and a code that does not exist yet.
@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to the presence of Extern calls in the function 'f'",
        "ptxas /tmp/x.ptx, line 32; warning C7508: setmaxnreg ignored",
        "ptxas warning : (C7599) something new",
        "ptxas info    : Potential Performance Loss: 'setmaxnreg' ignored",
    ],
)
def test_spellings(line):
    log = f"ptxas info    : 0 bytes gmem\n{line}\n{line}\nptxas info    : Used 8 registers\n"
    assert parse_log(log).messages == (line,)


def test_several_functions_give_the_maximum():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
ptxas         .     304 bytes stack frame, 572 bytes spill stores, 620 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 304 bytes cumulative stack size, 64 bytes smem
ptxas info    : Function properties for _Z1gPf
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 0 barriers
"""
    assert parse_log(log) == Resources(168, 572, 620, 304, 64, 1)


def test_nothing_is_read_from_nothing():
    assert parse_log("") == Resources()
    assert parse_log("kernel C75 and C75x and XC7510\n").messages == ()
