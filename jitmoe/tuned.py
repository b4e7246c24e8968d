"""Tuned plans: what measurement preferred to the heuristic's plan, by GPU, layer and token range.

A file of them is a person's to read and edit; `jitmoe.tune.save` writes it. The site file, named by
JITMOE_TUNED or tuned.json in the cache directory, comes before the one in this package. An entry
serves the very layer it was measured for, and no token count outside its range. A file or an entry
that cannot be used is said once and passed over: a call then gets the heuristic's plan. Groups of
ranks, which must plan alike, never use tuned plans.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jitmoe import settings
from jitmoe.jit import cache
from jitmoe.plan import heuristics
from jitmoe.plan.gpu import GpuSpec
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.plan import PlanError
from jitmoe.plan.problem import MoeProblem

VERSION = 1  # of the file
MEND = "repair the file, move it away"
FILE = "tuned.json"
SHIPPED = Path(__file__).with_name(FILE)
OFF = "off"  # of JITMOE_TUNED

# Fields of a plan that decide how fast it is, not what it computes.
TUNABLE = (
    "bucket",
    "num_stages",
    "num_local_pairs",
    "producer_regs",
    "math_regs",
    "unroll_k",
    "num_task_slots",
    "num_packed_stages",
    "extra_tokens",
)
# Fields of a plan that say what it computes, and on what.
LAYER = (
    *("arch", "format", "hidden", "intermediate", "num_experts", "top_k"),
    *("activation", "up_first", "interleaved", "has_bias", "weight_on_input", "batch_invariant"),
)


class TunedFileError(ValueError):
    """A tuned file that cannot be read or written."""


@dataclass(frozen=True)
class Entry:
    """One tuned plan.

    gpu, num_sms  the GPU it was measured on, as `gpu_name` gives it
    layer         the fields `LAYER` of a plan
    tokens        the first and the last token count it serves
    plan          the fields `TUNABLE`
    measured      what a reader may want to know: times, gains, date, driver, versions
    """

    gpu: str
    num_sms: int
    layer: dict
    tokens: tuple[int, int]
    plan: dict
    measured: dict

    @property
    def key(self) -> tuple:
        """What an entry is for: a file has at most one entry of a key and range."""
        return (self.gpu, self.num_sms, *(self.layer[name] for name in LAYER))

    def apply(self, plan: MegaMoePlan) -> MegaMoePlan:
        return replace(plan, **self.plan)


class Choice(NamedTuple):
    """A plan; `origin` is the file it is from and `tokens` the counts it serves, both None for the
    heuristic's.
    """

    plan: MegaMoePlan
    origin: Path | None = None
    tokens: tuple[int, int] | None = None

    @property
    def source(self) -> str:
        """heuristic, or which file: shipped or site."""
        if self.origin is None:
            return "heuristic"
        return "shipped" if self.origin == SHIPPED else "site"


def gpu_name(gpu: GpuSpec) -> str:
    """The driver's name without the vendor, so that the table's H200 is the device's."""
    return gpu.name.removeprefix("NVIDIA ")


def layer_fields(plan: MegaMoePlan) -> dict:
    return {name: getattr(plan, name) for name in LAYER}


def plan_fields(plan: MegaMoePlan) -> dict:
    return {name: getattr(plan, name) for name in TUNABLE}


def choose(problem: MoeProblem, gpu: GpuSpec, **variant) -> Choice:
    """The tuned plan for `problem` on `gpu` if there is one, else the heuristic's; `variant` is as
    in `heuristics.choose`. Raises PlanError if no plan fits.
    """
    plan = heuristics.choose(problem, gpu, **variant)
    for entry, origin in _entries_for(plan, gpu):
        if entry.tokens[0] <= problem.num_tokens <= entry.tokens[1]:
            try:
                return Choice(checked(entry.apply(plan), gpu), origin, entry.tokens)
            except ValueError as error:  # PlanError, or what only a person would write
                say_unusable(
                    origin, f"its plan for {entry.tokens[0]} tokens has no kernel: {error}"
                )
    return Choice(plan)


def checked(plan: MegaMoePlan, gpu: GpuSpec) -> MegaMoePlan:
    """`plan`, if it may stand for the heuristic's. Raises PlanError if not: it must fit traced too,
    and serve the bucket that bits depend on.
    """
    plan.check(gpu)
    replace(plan, trace=True).check(gpu)
    if plan.bucket == "prefill" and heuristics.has_one_bucket(
        plan.format, plan.batch_invariant, plan.num_ranks > 1
    ):
        raise PlanError(f"{plan.format} has the decode bucket alone here, got prefill")
    return plan


def edges(problem: MoeProblem, gpu: GpuSpec, num_tokens: int, **variant) -> list[int]:
    """Token counts up to `num_tokens` after which another plan may serve, for the tuned ones."""
    entries = _entries_for(heuristics.choose(problem, gpu, **variant), gpu)
    ends = {end for entry, _ in entries for end in (entry.tokens[0] - 1, entry.tokens[1])}
    return sorted(end for end in ends if 1 <= end < num_tokens)


def plans_of_model(problem: MoeProblem, gpu: GpuSpec, **variant) -> list[MegaMoePlan]:
    """Every kernel a model can need at any token count on any GPU of the architecture of `gpu`."""
    plans = list(heuristics.plans_of_model(problem, gpu, **variant).values())
    layer, found = layer_fields(plans[0]), []
    for path in () if plans[0].num_ranks > 1 else files():
        for entry in read(path):
            if entry.layer == layer:
                try:
                    found.append(checked(entry.apply(plans[0]), gpu))
                except ValueError as error:  # PlanError, or what only a person would write
                    say_unusable(path, f"a plan of it has no kernel: {error}")
    return list(dict.fromkeys(plans + found))


def say_unusable(path: Path, reason: str, remedy: str = "remove the entry") -> None:
    """Once for a file and reason."""
    cache.say_once(
        f"{path}: {reason}",
        "%s: %s; calls take the heuristic's plan. To be rid of this, %s or set JITMOE_TUNED=off",
        path,
        reason,
        remedy,
    )


def _entries_for(plan: MegaMoePlan, gpu: GpuSpec) -> list[tuple[Entry, Path]]:
    if plan.num_ranks > 1:
        return []
    key = (gpu_name(gpu), gpu.num_sms, *layer_fields(plan).values())
    return [(entry, path) for path in files() for entry in read(path) if entry.key == key]


def site_file() -> Path | None:
    """The file that `jitmoe.tune.save` writes; None if there is no place for it."""
    named = str(settings.get("JITMOE_TUNED"))
    if named.lower() == OFF:
        return None
    if named:
        return Path(os.path.expanduser(named)).absolute()
    directory, _ = cache.directories()
    return None if directory is None or settings.get("JITMOE_NO_CACHE") else directory / FILE


def absent_site_file() -> Path | None:
    """The file that JITMOE_TUNED names, if it is not there: misspelt, or not saved yet."""
    path = site_file() if settings.get("JITMOE_TUNED") else None
    return None if path is None or path.exists() else path


def files() -> list[Path]:
    """Those that are looked into, the first first."""
    if str(settings.get("JITMOE_TUNED")).lower() == OFF:
        return []
    return [path for path in (site_file(), SHIPPED) if path is not None]


@lru_cache
def read(path: Path) -> tuple[Entry, ...]:
    """The entries of a file that can be used, none if there is no file; read once a process. What
    is damaged is said once and left out.
    """
    try:
        return tuple(load(path, lambda reason: say_unusable(path, reason)))
    except TunedFileError as error:
        say_unusable(path, str(error), MEND)
    return ()


def load(path: Path, say: Callable[[str], None]) -> list[Entry]:
    """The entries of a file, none if there is no file; `say` gets a sentence for each that is left
    out, and "remove the entry" is its remedy. Raises TunedFileError for what is no tuned file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise TunedFileError(f"it cannot be read ({error})") from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise TunedFileError(f"it must be an object of version {VERSION}, as `save` writes it")
    if not isinstance(document.get("plans"), list):
        raise TunedFileError("it has no list of plans")
    entries = []
    for number, row in enumerate(document["plans"]):
        try:
            entries.append(_entry(row))
        except (KeyError, TypeError, ValueError) as error:
            say(f"entry {number} of its plans is damaged ({_in_words(error)})")
    return entries


def _in_words(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _entry(row: dict) -> Entry:
    """Raises KeyError, TypeError or ValueError for what is none."""
    if not isinstance(row, dict):
        raise ValueError(f"it must be an object, got {row!r}")
    if not isinstance(row["tokens"], list):
        raise ValueError(f"tokens must be two counts, got {row['tokens']!r}")
    entry = Entry(**(row | {"tokens": tuple(row["tokens"])}))
    first, last = entry.tokens
    if not (type(first) is type(last) is int and 1 <= first <= last):
        raise ValueError(f"tokens must be two counts, got {list(entry.tokens)}")
    for name, wanted in (("layer", LAYER), ("plan", TUNABLE)):
        if sorted(getattr(entry, name)) != sorted(wanted):
            raise ValueError(f"{name} must have {', '.join(wanted)}")
    kinds = {name: str if name == "bucket" else int for name in TUNABLE}
    if wrong := [name for name, kind in kinds.items() if type(entry.plan[name]) is not kind]:
        raise ValueError(f"plan has something else than a number in {', '.join(wrong)}")
    return entry


def load_to_write(path: Path) -> list[Entry]:
    """The entries of a file that is to be replaced. Raises TunedFileError if it is damaged."""
    try:
        return load(path, _refuse)
    except TunedFileError as error:
        raise TunedFileError(
            f"{path} is damaged and not overwritten: {error}; repair it or move it away"
        ) from None


def write(path: Path, merge: Callable[[list[Entry]], Iterable[Entry]]) -> None:
    """Replace the entries of a file by what `merge` makes of them: whole or not at all, and one
    writer after the other. Raises TunedFileError for a file that is damaged, and OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = load_to_write(path)
        entries = sorted(merge(entries), key=lambda entry: (str(entry.key), entry.tokens))
        document = {"version": VERSION, "plans": [asdict(entry) for entry in entries]}
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.write(json.dumps(document, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    read.cache_clear()


def _refuse(reason: str) -> None:
    raise TunedFileError(reason)
