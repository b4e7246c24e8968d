"""What planning needs to know of a GPU, as a table, so that plans are made without one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jitmoe.plan.formats import format_of


@dataclass(frozen=True)
class GpuSpec:
    """Capacities and sustained rates of one GPU.

    `read_gbps` is the sustained read bandwidth of device memory in GB/s and `fp8_tflops` the
    sustained dense FP8 rate with two-level accumulation in TFLOP/s, `bf16_tflops` that of bf16;
    `measured` tells measured rates from those scaled from a datasheet.
    """

    name: str
    arch: str
    num_sms: int
    smem_bytes: int
    read_gbps: float
    fp8_tflops: float
    bf16_tflops: float
    l2_bytes: int
    measured: bool = False
    link_gbps: float = 450  # NVLink to other GPUs, each way (datasheets)

    def tflops(self, format: str) -> float:
        """The sustained dense rate of a number format of `formats.FORMATS`."""
        return self.fp8_tflops if format_of(format).quantizes else self.bf16_tflops

    @property
    def compute_capability(self) -> tuple[int, int]:
        digits = self.arch.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])


KERNEL_ARCHS = ("sm_90a",)  # architectures that kernels exist for

HOPPER_SMEM_BYTES = 232_448  # opt-in maximum of one CTA, sm_90 and sm_100 alike

# Rates of the H200: pure read and two-level FP8 measured on one card, 2026-11-29 (README, "measured
# facts"), and bf16 of a matmul of random numbers. The others are datasheet figures times the
# fraction the H200 reaches: 4645/4800 of memory, 1440/1979 of FP8, 788/989 of bf16.
GPUS = {
    "h200": GpuSpec(
        "H200", "sm_90a", 132, HOPPER_SMEM_BYTES, 4645, 1440, 788, 60 << 20, measured=True
    ),
    "h100-sxm": GpuSpec("H100 SXM", "sm_90a", 132, HOPPER_SMEM_BYTES, 3240, 1440, 788, 50 << 20),
    "h100-pcie": GpuSpec(
        "H100 PCIe", "sm_90a", 114, HOPPER_SMEM_BYTES, 1935, 1100, 602, 50 << 20, link_gbps=0
    ),
    "h20": GpuSpec("H20", "sm_90a", 78, HOPPER_SMEM_BYTES, 3870, 215, 118, 60 << 20),
    "b200": GpuSpec(
        "B200", "sm_100a", 148, HOPPER_SMEM_BYTES, 7740, 3270, 1790, 126 << 20, link_gbps=900
    ),
}


def gpu_spec(name: str) -> GpuSpec:
    """The spec called `name` (a key of `GPUS`). Raises ValueError for an unknown name."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}; got {name!r}") from None


def match_device(device_name: str, arch: str, num_sms: int, smem_bytes: int) -> GpuSpec:
    """The spec of a detected device: rates from the table row it names, capacities from the device.

    `device_name` is the driver's name (such as "NVIDIA H200"). A device that names no row gets the
    slowest rates of its architecture. Raises ValueError for an architecture without a kernel.
    """
    if arch not in KERNEL_ARCHS:
        raise ValueError(
            f"{device_name} is {arch}; kernels exist for {', '.join(KERNEL_ARCHS)}. "
            "Run on a Hopper GPU (H100, H200, H20)."
        )
    rows = [spec for spec in GPUS.values() if spec.arch == arch]
    words = set(device_name.lower().replace("-", " ").split())
    named = [spec for spec in rows if spec.name.split()[0].lower() in words]
    # "H100 PCIe" is the PCIe row, any other H100 (the driver says "H100 80GB HBM3") the SXM one.
    exact = [spec for spec in named if set(spec.name.lower().split()) <= words]
    row = (exact or named or [min(rows, key=lambda spec: spec.read_gbps)])[0]
    return replace(
        row,
        name=device_name,
        num_sms=num_sms,
        smem_bytes=smem_bytes,
        measured=row.measured and bool(named),
    )
