"""What the card can do in this run: pure read, copy, and dense GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from jitmoe.bench import times
from jitmoe.plan.formats import format_of

NUM_BURSTS = 5
NUM_BYTES = 4 << 30
GEMM = (4096, 7168, 16384)  # m, n, k

# Sums 16-byte words of a buffer, 8 loads in flight a thread; a sum is stored only if it is magic,
# so that the loads stay.
_READ = r"""
extern "C" __global__ void __launch_bounds__(512, 2)
read_all(const uint4* p, long long n, unsigned* y) {
    const long long step = (long long)gridDim.x * blockDim.x;
    unsigned sum = 0;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = p[i + j * step];
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += step) sum += p[i].x;
    if (sum == 0x9e3779b9u) *y = sum;
}
"""


@dataclass(frozen=True)
class Ceilings:
    """Sustained rates of one run: GB/s (a copy counts bytes read and written) and TFLOP/s.

    fp8_tflops  two-level accumulation, as block scales need: cuBLAS without fast accumulation
    fp8_fast_tflops  cuBLAS with it
    bf16_tflops  cuBLAS
    skipped     why there are no rates of GEMMs
    """

    read_gbps: float
    copy_gbps: float
    fp8_tflops: float | None = None
    fp8_fast_tflops: float | None = None
    bf16_tflops: float | None = None
    skipped: str | None = None

    def tflops(self, format: str) -> float | None:
        """The rate of a number format of `plan.formats.FORMATS`, if it was measured."""
        return self.fp8_tflops if format_of(format).quantizes else self.bf16_tflops


def measure(heat: str) -> Ceilings:
    """Ceilings of the current device, cool or hot."""
    import cupy

    read_gbps, copy_gbps = _memory(heat)
    cupy.get_default_memory_pool().free_all_blocks()
    if reason := no_gemm():
        return Ceilings(read_gbps, copy_gbps, skipped=reason)
    kinds = ("fp8", "fp8_fast", "bf16")
    return Ceilings(read_gbps, copy_gbps, *(_gemm(heat, kind) for kind in kinds))


def no_gemm() -> str | None:
    """Why an FP8 GEMM of torch cannot be run, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch is not importable ({error})"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None if hasattr(torch, "_scaled_mm") else "this torch has no _scaled_mm"


def _memory(heat: str) -> tuple[float, float]:
    import cupy

    source, target = (cupy.empty(NUM_BYTES, cupy.uint8) for _ in range(2))
    source.fill(1)
    stream = cupy.cuda.get_current_stream()
    kernel = cupy.RawKernel(_READ, "read_all")
    grid = 2 * cupy.cuda.Device().attributes["MultiProcessorCount"]

    def read():
        kernel((grid,), (512,), (source, NUM_BYTES // 16, target))

    def copy():
        target[...] = source

    reading, copying = (
        times.measure(launch, stream, 1, heat, NUM_BURSTS).median for launch in (read, copy)
    )
    return NUM_BYTES / reading * 1e-3, 2 * NUM_BYTES / copying * 1e-3


def _gemm(heat: str, kind: str) -> float:
    import cupy
    import torch

    m, n, k = GEMM
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16).to(dtype) for rows in (m, n))
    one = torch.ones((), device="cuda")

    def gemm():
        if kind == "bf16":
            return torch.mm(a, b.t())
        fast = kind == "fp8_fast"
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    gemm()
    torch.cuda.synchronize()
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    us = times.measure(gemm, stream, 1, heat, NUM_BURSTS).median
    return 2 * m * n * k / us * 1e-6
