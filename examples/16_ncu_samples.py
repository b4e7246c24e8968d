"""Where Nsight Compute's samples of a kernel fall: by role, function and reason to stall.

    JITMOE_LINEINFO=1 ncu --clock-control none -k regex:mega_moe --section SourceCounters -o rep \\
        python your_call.py
    ncu --import rep.ncu-rep --page source --csv > rep.csv
    python examples/16_ncu_samples.py rep.csv ENTRY [--kernel 0] [--depth 2] [--lines 30]

ENTRY is the kernel's folder in the cache (`jitmoe cache list`): its text, and its cubin, whose line
information nvdisasm reads (PyPI: nvidia-cuda-nvdisasm; or on PATH). A share is of a role's samples,
so that of a role that mostly waits says little. An instruction that waits for a load is charged,
not the load.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import site
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

SAMPLES = "# Samples"
_HEADER = re.compile(r'(?: {4})?(?:DEVICE|extern "C") .*?\b(\w+)\((?!kNumThreads)')
_PLACE = re.compile(r'//## File ".*?", line (\d+)')
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/")


class Instruction(NamedTuple):
    samples: int
    stalls: dict[str, int]  # by reason


def disassembler() -> str:
    """The newest nvdisasm of a wheel, else that on PATH. Raises FileNotFoundError."""
    folders = {*site.getsitepackages(), site.getusersitepackages(), *sys.path}
    found = [p for f in folders for p in Path(f or ".").glob("nvidia/*/bin/nvdisasm")]
    path = max((str(p) for p in found if os.access(p, os.X_OK)), default=shutil.which("nvdisasm"))
    if path is None:
        raise FileNotFoundError("there is no nvdisasm; pip install nvidia-cuda-nvdisasm")
    return path


def read_samples(path: Path) -> list[list[Instruction]]:
    """Of every kernel of a report's source page, in the order of addresses. Raises ValueError for a
    page without samples.
    """
    kernels, names = [], []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            if row[:1] == ["Kernel Name"]:
                kernels.append([])
            elif row[:1] == ["Address"]:
                names = row
                if SAMPLES not in names:
                    raise ValueError(
                        f"{path} has no column {SAMPLES!r}; export it by --section SourceCounters "
                        "and --page source --csv"
                    )
            elif kernels and len(row) == len(names):
                cells = dict(zip(names, row, strict=True))
                stalls = {
                    name.removeprefix("stall_"): int(value)
                    for name, value in cells.items()
                    if name.startswith("stall_") and "Not Issued" not in name and int(value)
                }
                kernels[-1].append(Instruction(int(cells[SAMPLES]), stalls))
    return kernels


def functions_of_lines(text: str) -> list[str]:
    """By line number, from 1; functions of structs have no other name than their own."""
    names = [""]
    for line in text.split("\n"):
        header = _HEADER.match(line)
        names.append(header[1] if header else names[-1])
    return names


def read_places(cubin: Path) -> list[list[int]]:
    """Of every instruction, in the order of addresses: its line, and those it is inlined at."""
    command = [disassembler(), "-gi", "-c", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    places, lines, are_old = [], [], False
    for line in listing.split("\n"):
        if place := _PLACE.search(line):
            lines = [] if are_old else lines
            lines.append(int(place[1]))
            are_old = False
        elif _INSTRUCTION.match(line):
            places.append(lines)
            are_old = True
    return places


def table(kernel: list[Instruction], entry: Path, depth: int, num_lines: int) -> str:
    """The functions with most samples, `depth` of them below a role. Raises ValueError for an entry
    of another kernel, or without line information.
    """
    functions = functions_of_lines((entry / "kernel.cu").read_text(encoding="utf-8"))
    places_of = read_places(entry / "kernel.cubin")
    if len(places_of) != len(kernel):
        raise ValueError(
            f"the report's kernel has {len(kernel):,} instructions, that of {entry} has "
            f"{len(places_of):,}; pass the entry that ran, or another --kernel"
        )
    if not any(places_of):
        raise ValueError(f"{entry} has no line information; run with JITMOE_LINEINFO=1")
    samples, of_role, stalls = Counter(), Counter(), defaultdict(Counter)
    for one, places in zip(kernel, places_of, strict=True):
        chain = [functions[line] for line in reversed(places)][1:]  # less the kernel itself
        role, *rest = chain or [""]
        key = role, "/".join(rest[:depth])
        samples[key] += one.samples
        of_role[role] += one.samples
        stalls[key].update(one.stalls)
    rows = [f"{'samples':>8} {'of role':>8}  role: functions (stalls)"]
    for (role, rest), number in samples.most_common(num_lines):
        if number:
            why = ", ".join(f"{name} {n}" for name, n in stalls[role, rest].most_common(3))
            rows.append(f"{number:8} {number / of_role[role]:8.1%}  {role}: {rest} ({why})")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path, help="ncu's source page as CSV")
    parser.add_argument("entry", type=Path, help="the kernel's folder in the cache")
    parser.add_argument("--kernel", type=int, default=0, help="which of the report's, from 0")
    parser.add_argument("--depth", type=int, default=2, help="functions below a role")
    parser.add_argument("--lines", type=int, default=30)
    arguments = parser.parse_args()
    try:
        kernels = read_samples(arguments.report)
        if not 0 <= arguments.kernel < len(kernels):
            parser.error(f"--kernel must be below {len(kernels)}, got {arguments.kernel}")
        print(table(kernels[arguments.kernel], arguments.entry, arguments.depth, arguments.lines))
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
