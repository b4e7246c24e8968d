"""An emulated launch: arrays into a file that a process of its own maps, the report back.

Knows plans, not experts.
"""

from __future__ import annotations

import mmap
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jitmoe.jit import params
from jitmoe.jit.render import role_ranges
from jitmoe.plan.memory_map import align
from jitmoe.plan.plan import Plan

_MAP_MAGIC = 0x50414D54
_PAGE = 4096
DONE, BAD_JOB, STALL, FAULT, GAVE_UP = 0, 2, 3, 4, 5


class EmulationError(RuntimeError):
    """The kernel stalled, broke a rule of the machine, or took too long; the text is the report."""


@dataclass(frozen=True)
class TensorMap:
    """A parameter that is a tensor map over the array called `array`.

    Dimensions and box are innermost first; strides are in bytes and leave out the innermost.
    """

    array: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def encode(self) -> bytes:
        """As runtime/mbarrier.cpp reads it; the address is filled in there."""
        rank = len(self.dims)
        dims = (*self.dims, *[0] * (5 - rank))
        strides = (*self.strides, *[0] * (5 - rank))
        box = (*self.box, *[0] * (5 - rank))
        return struct.pack("<QII5Q4Q5I", 0, _MAP_MAGIC, rank, *dims, *strides, *box)


@dataclass(frozen=True)
class Array:
    """A NumPy array in the kernel's memory. `writable` ones are copied back; others fault."""

    data: np.ndarray
    writable: bool = False


def launch(
    executable: Path,
    plan: Plan,
    arrays: Mapping[str, Array],
    scalars: Mapping[str, int],
    maps: Mapping[str, TensorMap],
    *,
    num_blocks: int,
    seed: int = 0,
    expire: bool = False,
    timeout_s: float = 600.0,
) -> str:
    """Run the kernel once; writable arrays are changed in place. Returns the report.

    `arrays` are by parameter name; a pointer that is not among them is null. With `expire` the
    clock runs out after a stall, so that waits with a budget give up. Raises EmulationError.
    """
    layout = params.layout(plan.params)
    record = np.zeros((), layout.dtype)
    for name, value in scalars.items():
        record[name] = value
    for name, tensor_map in maps.items():
        record[name] = np.void(tensor_map.encode().ljust(128, b"\0"))
    offsets = {field.name: field.offset for field in layout.fields}
    job = [
        f"grid {num_blocks} {plan.num_threads} {plan.smem.num_bytes}",
        f"seed {seed} {int(expire)}",
        f"params {record.tobytes().hex()}",
    ]
    for region in plan.smem.regions:
        count = region.shape[0] if len(region.shape) > 1 or region.ctype == "u64" else 1
        job.append(
            f"shared {region.name} {plan.smem.offsets[region.name]} {region.num_bytes} {count}"
        )
    job += [f"role {r.role.name} {r.begin} {r.end}" for r in role_ranges(plan.roles)]

    with tempfile.NamedTemporaryFile(prefix="jitmoe-emulated-") as file:
        job.insert(0, f"file {file.name}")
        places, end = {}, 0
        for idx, (name, array) in enumerate(arrays.items()):
            num_bytes = array.data.nbytes
            # Flush with the end of its pages, as alignment allows: what follows is no memory.
            mapped = align(max(num_bytes, 1), _PAGE)
            lead = mapped - align(max(num_bytes, 1), 16)
            places[name] = end + lead
            job.append(f"region {name} {end} {mapped} {lead} {num_bytes} {int(array.writable)}")
            if name in offsets:
                job.append(f"pointer {offsets[name]} {idx}")
            job += [f"pointer {offsets[m]} {idx}" for m, t in maps.items() if t.array == name]
            end += mapped
        file.truncate(max(end, 1))
        with mmap.mmap(file.fileno(), max(end, 1)) as memory:
            for name, array in arrays.items():
                data = array.data.tobytes()
                memory[places[name] : places[name] + len(data)] = data
            report = _run(executable, "\n".join(job) + "\n", timeout_s, seed)
            for name, array in arrays.items():
                if array.writable:
                    data = memory[places[name] : places[name] + array.data.nbytes]
                    array.data[...] = np.frombuffer(data, array.data.dtype).reshape(
                        array.data.shape
                    )
    return report


_CODE = re.compile(r"<([0-9a-f]+) ([0-9a-f]+)>")


def _with_lines(executable: Path, report: str) -> str:
    """Addresses of code, <at caller>, as file:line: the place in a role that an access belongs to.

    Needs addr2line or llvm-symbolizer; without them addresses stay.
    """
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None or not _CODE.search(report):
        return report

    def line(match: re.Match) -> str:
        # Return addresses: the call is before them. -i lists what is inlined there, innermost first.
        places = [f"{int(address, 16) - 1:x}" for address in match.groups()]
        command = [tool, "-i", "-e", str(executable), *places]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        frames = re.findall(r"(?:^|/)(templates/\S+:\d+|kernel.cpp:\d+)", output, re.MULTILINE)
        roles = [f for f in frames if not f.startswith(("templates/device", "templates/emulated"))]
        return (roles or frames or [match[0]])[0]

    return _CODE.sub(line, report)


def _run(executable: Path, job: str, timeout_s: float, seed: int) -> str:
    try:
        result = subprocess.run(
            [str(executable)],
            input=job,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EmulationError(
            f"the emulated kernel ran for more than {timeout_s:g} s (seed {seed})"
        ) from None
    report = _with_lines(executable, result.stdout + result.stderr)
    if result.returncode not in (DONE, GAVE_UP):
        raise EmulationError(report or f"the emulated kernel ended with code {result.returncode}")
    return report
