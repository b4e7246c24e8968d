"""Sentences about experts modules of transformers that there is no kernel for."""

from __future__ import annotations

NAME = "jitmoe"


def refuse(module, allowed: str, got, remedy: str) -> None:
    """Raise NotImplementedError, one sentence."""
    raise NotImplementedError(
        f'{named(module)}: experts_implementation="{NAME}" needs {allowed}, got {got}; {remedy}'
    )


def named(module) -> str:
    model = getattr(getattr(module, "config", None), "model_type", "")
    return type(module).__name__ + (f" of {model}" if model else "")


def dtype_of(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
