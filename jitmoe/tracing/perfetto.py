"""Chrome's JSON of a trace, which ui.perfetto.dev opens: a process a block, a thread a warp."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from jitmoe.tracing.events import EVENTS, WAIT, Timeline, task_fields

_GEMMS = ("GEMM 1", "GEMM 2")


def write(timeline: Timeline, path: Path | str) -> None:
    """Write the events to `path`. A step of the emulator counts as a microsecond there.

    Raises OSError.
    """
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for number, record in enumerate(_records(timeline)):
            file.write(",\n" * (number > 0) + json.dumps(record))
        file.write("\n]}\n")


def _records(timeline: Timeline) -> Iterator[dict]:
    events, roles = timeline.events, timeline.roles
    warps = dict.fromkeys(
        zip(*(events[n].tolist() for n in ("block", "warp", "role")), strict=True)
    )
    for block in dict.fromkeys(block for block, _, _ in warps):
        yield _name("process_name", block, 0, f"block {block}")
    for block, warp, role in warps:
        yield _name("thread_name", block, warp, f"{roles[role]} {warp}")
        # Listed by warp, not by name.
        order = {"sort_index": warp}
        yield {"ph": "M", "name": "thread_sort_index", "pid": block, "tid": warp, "args": order}
    scale = 1e-3 if timeline.unit == "ns" else 1.0
    fields = {name: values.tolist() for name, values in task_fields(events["payload"]).items()}
    for i, (block, warp, _, event, _, payload, begin, end) in enumerate(events.tolist()):
        name, args = EVENTS[event], {}
        if name == "task":
            args = {key: values[i] for key, values in fields.items()}
            name = _GEMMS[args.pop("phase")]
        elif event > WAIT:
            args = {"index": payload}
        times = {"ts": begin * scale, "dur": (end - begin) * scale}
        yield {"name": name, "ph": "X", "pid": block, "tid": warp, **times, "args": args}


def _name(what: str, block: int, warp: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": block, "tid": warp, "args": {"name": name}}
