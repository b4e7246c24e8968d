"""Emulated launches: arrays into a file that a process of its own maps, the report back.

Knows plans, not experts.
"""

from __future__ import annotations

import mmap
import re
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """A NumPy array in the kernel's memory. `writable` ones are copied back; others fault. Ranks
    that have the same object share its memory.

    `addresses` puts the addresses of other arrays, (rank, name), at bytes of this one: a table of
    peers' memory.
    """

    data: np.ndarray
    writable: bool = False
    addresses: Mapping[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rank:
    """A launch: `arrays` are by parameter name, a pointer that is not among them is null.

    `late`, in a stream: by name what some of the arrays hold from the moment when all that came
    before is over, as if a kernel that let this launch start early wrote it as its last act.
    `stream`: which GPU's stream, where launches are in streams.
    """

    arrays: Mapping[str, Array]
    scalars: Mapping[str, int | float]
    maps: Mapping[str, TensorMap] = field(default_factory=dict)
    num_blocks: int = 1
    late: Mapping[str, np.ndarray] = field(default_factory=dict)
    stream: int = 0


def launch(
    executable: Path,
    plan: Plan,
    ranks: Sequence[Rank],
    *,
    cluster_size: int = 1,
    in_stream: bool = False,
    seed: int = 0,
    expire: bool = False,
    delays: bool = False,
    kill: tuple[int, int] | None = None,
    hardware_sums: bool = False,
    timeout_s: float = 600.0,
) -> str:
    """Run the launches; writable arrays are changed in place. Returns the report.

    All run at once, each on a GPU of its own: a rank; or with `in_stream` each in its
    `Rank.stream`. Streams run at once, a GPU each, and the report calls them ranks. Launches of a
    stream follow each other as they do in `ranks`, each a programmatic dependent of the one before:
    it may start when every block there has called start_next_launch() or exited.

    expire         after a stall the clock runs out, so that waits with a budget give up
    delays         streams are held back now and then, some for longer than launches take; so are
                   puts and signals of the network card
    kill           (stream, step of the scheduler): from then on nothing runs in that stream, and
                   what its network card has not sent never arrives
    hardware_sums  matrix multiplies cut sums off as an H200 does, else they are exact

    Raises EmulationError.
    """
    streams = [rank.stream if in_stream else number for number, rank in enumerate(ranks)]
    if not in_stream and any(rank.late for rank in ranks):
        raise ValueError("late contents arrive in a stream only")
    if not in_stream and any(rank.stream for rank in ranks):
        raise ValueError("launches have a stream each unless in_stream is given")
    if kill is not None and kill[0] not in streams:
        raise ValueError(f"no launch is in stream {kill[0]}, which is to be killed")
    job = [
        f"blocks {plan.num_threads} {plan.smem.num_bytes} {cluster_size}",
        f"seed {seed} {int(expire)}",
    ]
    if delays:
        job.append("delays")
    if kill is not None:
        job.append(f"kill {kill[0]} {kill[1]}")
    if hardware_sums:
        job.append("hardware_sums")
    for region in plan.smem.regions:
        count = region.shape[0] if len(region.shape) > 1 or region.ctype == "u64" else 1
        job.append(
            f"shared {region.name} {plan.smem.offsets[region.name]} {region.num_bytes} {count}"
        )
    job += [f"role {r.role.name} {r.begin} {r.end}" for r in role_ranges(plan.roles)]

    with tempfile.NamedTemporaryFile(prefix="jitmoe-emulated-") as file:
        job.insert(0, f"file {file.name}")
        places = _place(ranks)
        late, end = _place_late(ranks, max((place.end for place in places.values()), default=1))
        file.truncate(end)
        job += _grids(plan, ranks, streams, places, late)
        with mmap.mmap(file.fileno(), 0) as memory:
            for (rank, name), place in places.items():
                data = ranks[rank].arrays[name].data.tobytes()
                memory[place.begin : place.begin + len(data)] = data
            for (rank, name), begin in late.items():
                data = ranks[rank].late[name].tobytes()
                memory[begin : begin + len(data)] = data
            report = _run(executable, "\n".join(job) + "\n", timeout_s, seed)
            for (rank, name), place in places.items():
                array = ranks[rank].arrays[name]
                if array.writable:
                    data = memory[place.begin : place.begin + array.data.nbytes]
                    array.data[...] = np.frombuffer(data, array.data.dtype).reshape(
                        array.data.shape
                    )
    return report


@dataclass(frozen=True)
class _Place:
    """Where an array lies: pages of the file, and the array at their end."""

    number: int
    first_page: int
    begin: int
    end: int


def _place(ranks: Sequence[Rank]) -> dict[tuple[int, str], _Place]:
    places, by_array, end = {}, {}, 0
    for rank, launched in enumerate(ranks):
        for name, array in launched.arrays.items():
            if id(array) not in by_array:
                # Flush with the end of its pages, as alignment allows: what follows is no memory.
                num_bytes = max(array.data.nbytes, 1)
                first, end = end, end + align(num_bytes, _PAGE)
                begin = end - align(num_bytes, 16)
                by_array[id(array)] = _Place(len(by_array), first, begin, end)
            places[rank, name] = by_array[id(array)]
    return places


def _place_late(ranks: Sequence[Rank], end: int) -> tuple[dict[tuple[int, str], int], int]:
    """Where in the file late contents wait, from `end` on; and the new end."""
    begins = {}
    for rank, launched in enumerate(ranks):
        for name, data in launched.late.items():
            size = launched.arrays[name].data.nbytes
            if data.nbytes != size:
                raise ValueError(f"late {name} has {data.nbytes} bytes, the array has {size}")
            begins[rank, name], end = end, end + data.nbytes
    return begins, end


def _grids(
    plan: Plan,
    ranks: Sequence[Rank],
    streams: Sequence[int],
    places: Mapping[tuple[int, str], _Place],
    late: Mapping[tuple[int, str], int],
):
    """Lines of the job for the parameters and memory of every launch."""
    layout = params.layout(plan.params)
    offsets = {f.name: f.offset for f in layout.fields}
    suffixes = _suffixes(streams, places)
    num_regions = 0
    for rank, launched in enumerate(ranks):
        record = np.zeros((), layout.dtype)
        for name, value in launched.scalars.items():
            record[name] = value
        for name, tensor_map in launched.maps.items():
            record[name] = np.void(tensor_map.encode().ljust(128, b"\0"))
        yield f"grid {streams[rank]} {launched.num_blocks} {record.tobytes().hex()}"
        for name, array in launched.arrays.items():
            place = places[rank, name]
            if place.number == num_regions:
                num_regions += 1
                title = name + suffixes[place.number]
                lead, mapped = place.begin - place.first_page, place.end - place.first_page
                size, writable = array.data.nbytes, int(array.writable)
                yield f"region {title} {place.first_page} {mapped} {lead} {size} {writable}"
            if (rank, name) in late:
                yield f"late {place.number} {late[rank, name]}"
            if name in offsets:
                yield f"pointer {offsets[name]} {place.number}"
            for field_name, tensor_map in launched.maps.items():
                if tensor_map.array == name:
                    yield f"pointer {offsets[field_name]} {place.number}"
    for key, place in places.items():
        for at, target in ranks[key[0]].arrays[key[1]].addresses.items():
            yield f"address {place.number} {at} {places[target].number}"


def _suffixes(streams: Sequence[int], places: Mapping[tuple[int, str], _Place]) -> dict[int, str]:
    """By array whose it is, where it is not everyone's: @rank1, @launch0, @launch0@rank1."""
    users = defaultdict(set)
    for (rank, _), place in places.items():
        users[place.number].add(rank)
    suffixes = {}
    for number, ranks in users.items():
        stream = streams[min(ranks)]
        launch = [rank for rank, of in enumerate(streams) if of == stream].index(min(ranks))
        of_launch = (
            f"@launch{launch}" if len(ranks) == 1 and len(set(streams)) < len(streams) else ""
        )
        is_one = len({streams[rank] for rank in ranks}) == 1 < len(set(streams))
        suffixes[number] = of_launch + (f"@rank{stream}" if is_one else "")
    return suffixes


_CODE = re.compile(r"<([0-9a-f]+) ([0-9a-f]+)>")


def _with_lines(executable: Path, report: str) -> str:
    """Addresses of code, <at caller>, as file:line: the place in a role that an access belongs to.

    Needs addr2line or llvm-symbolizer; without them addresses stay.
    """
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None or not _CODE.search(report):
        return report

    def line(match: re.Match) -> str:
        # Return addresses: the call is before them. -i lists what is inlined, innermost first.
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
