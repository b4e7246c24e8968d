"""Plan -> source text, which has no `#include`: the text is all that a compiler reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import jinja2

from jitmoe.jit import params
from jitmoe.plan.plan import Plan, Role

_PACKAGE = Path(__file__).resolve().parents[1]
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*", re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\n", re.MULTILINE)


class RenderError(ValueError):
    """A room or a pasted file that cannot become one self-contained text."""


def templates_dir() -> Path:
    """The packaged templates, else those of the checkout. Raises RenderError if there are none."""
    candidates = (_PACKAGE / "templates", _PACKAGE.parent / "templates")
    for candidate in candidates:
        if (
            candidate / "device"
        ).is_dir():  # guards against some other package's folder of that name
            return candidate
    raise RenderError(f"no templates in {' or '.join(map(str, candidates))}; install jitmoe again")


def render(plan: Plan, layer: str = "device", templates: Path | None = None) -> str:
    """The CUDA source of `plan`, from its room `<plan.name>.cu.jinja`.

    `layer` is the folder that stands in for `device/`. Raises RenderError for a missing room or
    file, one pasted twice, a name that does not exist, or an `#include`.
    """
    env = _environment(templates or templates_dir())
    context = {
        "plan": plan,
        "plan_hash": plan_hash(plan),
        "plan_fields": {f.name: getattr(plan, f.name) for f in fields(plan)},
        "param_layout": params.layout(plan.params),
        "role_ranges": role_ranges(plan.roles),
        "constant_values": plan.constants,
    }
    context["paste"] = _Paste(env, context, layer)
    try:
        text = env.get_template(f"{plan.name}.cu.jinja").render(context)
    except jinja2.TemplateNotFound as error:
        raise RenderError(f"{plan.name}: no file {error.name} among the templates") from None
    except jinja2.TemplateError as error:
        raise RenderError(f"{plan.name} cannot be rendered: {error}") from error
    if found := _INCLUDE.search(text):
        raise RenderError(
            f"{plan.name}: rendered text must include nothing, found {found[0].strip()!r}"
        )
    return text


@lru_cache(1024)
def plan_hash(plan: Plan) -> str:
    """Short name of a plan, the same on every machine."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:8]


def constant_name(name: str) -> str:
    """`num_stages` -> `kNumStages`.

    >>> constant_name("num_k_blocks_1")
    'kNumKBlocks1'
    """
    return "k" + "".join(word[:1].upper() + word[1:] for word in name.split("_"))


@dataclass(frozen=True)
class RoleRange:
    """A role with its warps `begin` .. `end - 1`."""

    role: Role
    begin: int
    end: int


def role_ranges(roles: tuple[Role, ...]) -> list[RoleRange]:
    ranges, end = [], 0
    for role in roles:
        ranges.append(RoleRange(role, end, end + role.num_warps))
        end += role.num_warps
    return ranges


def register_groups(ranges: list[RoleRange]) -> list[list[RoleRange]]:
    """Consecutive roles with one register count: whole warpgroups, as `check_roles` holds."""
    return [list(group) for _, group in groupby(ranges, key=lambda r: r.role.num_regs)]


def constant_type(value: int) -> str:
    """The narrowest of u32, i32, u64, i64 that holds `value`, unsigned first."""
    limits = (("u32", 0, 2**32), ("i32", -(2**31), 0), ("u64", 0, 2**64), ("i64", -(2**63), 0))
    for name, low, high in limits:
        if low <= value < high:
            return name
    raise RenderError(f"no 64-bit type holds the constant {value}")


class _Paste:
    """`{{ paste("device/tma.cuh") }}`: a file under a one-line banner, once in a text at most."""

    def __init__(self, env: jinja2.Environment, context: dict, layer: str):
        self._env, self._context, self._layer = env, context, layer
        self._pasted: set[str] = set()

    def __call__(self, path: str) -> str:
        folder, slash, rest = path.partition("/")
        replaced = f"{self._layer}/{rest}"
        is_replaced = folder == "device" and slash and replaced in self._env.list_templates()
        actual = replaced if is_replaced else path  # a file without PTX serves every layer
        if actual in self._pasted:
            raise RenderError(f"{actual} is pasted twice; a room lists each file once, in order")
        self._pasted.add(actual)
        if actual.endswith(".jinja"):
            body = self._env.get_template(actual).render(self._context)
        else:
            body = self._env.loader.get_source(self._env, actual)[0]
        return f"// ==== {actual} ====\n{_PRAGMA_ONCE.sub('', body)}"


@lru_cache
def _environment(templates: Path) -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters |= {"constant": constant_name, "constant_type": constant_type, "columns": _columns}
    env.globals |= {"register_groups": register_groups}
    return env


def _columns(rows: list[list], aligns: str) -> Iterator[str]:
    """Rows as lines of a comment table; `aligns` has a `<` or `>` for each column."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = (f"{cell:{a}{w}}" for cell, a, w in zip(row, aligns, widths, strict=True))
        yield "  ".join(line).rstrip()
