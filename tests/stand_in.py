"""Packages that cannot be installed here, for their adapters: modules made of a test's classes."""

from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import contextmanager
from types import ModuleType

import jitmoe.integrations


@contextmanager
def adapter(name: str, places: dict[str, list]):
    """jitmoe.integrations.`name`, imported with modules of these paths in which these objects are.

    places  dotted path -> classes and functions, by their own names, and (name, value)
    """
    before = dict(sys.modules)
    own = f"jitmoe.integrations.{name}"
    try:
        for path, objects in places.items():
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                part = ".".join(parts[:end])
                if not getattr(sys.modules.get(part), "is_stand_in", False):
                    sys.modules[part] = module = ModuleType(part)
                    module.is_stand_in, module.__path__ = True, []
                    if end > 1:
                        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
            for thing in objects:
                key, value = thing if isinstance(thing, tuple) else (thing.__name__, thing)
                setattr(sys.modules[path], key, value)
        sys.modules.pop(own, None)
        yield importlib.import_module(own)
    finally:
        for path in set(sys.modules) - set(before):
            if path == own or getattr(sys.modules[path], "is_stand_in", False):
                del sys.modules[path]
        sys.modules.update(before)
        vars(jitmoe.integrations).pop(name, None)


def parameters(function) -> list[tuple[str, object]]:
    """Names and kinds of a function's parameters, in order."""
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def methods(kind: type) -> dict[str, object]:
    """Methods and properties that a class defines itself."""
    functions = {}
    for name, value in vars(kind).items():
        value = getattr(value, "__func__", getattr(value, "fget", value))
        if inspect.isfunction(value):
            functions[name] = value
    return functions


def differences(stand_in: type, real: type) -> list[str]:
    """Methods of the stand-in that the real class lacks or has with other parameters."""
    found = []
    for name, function in methods(stand_in).items():
        other = inspect.getattr_static(real, name, None)
        other = getattr(other, "__func__", getattr(other, "fget", other))
        if not inspect.isfunction(other):
            found.append(f"{real.__name__} has no {name}")
        elif parameters(function) != parameters(other):
            found.append(f"{real.__name__}.{name}{inspect.signature(other)}")
    return found
