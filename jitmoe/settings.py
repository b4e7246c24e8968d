"""Every JITMOE_* switch in one table, read when it is used: programs and tests may set it late."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """An environment variable; the type of `default` says how it is read (bool, float or str)."""

    name: str
    default: bool | float | str
    meaning: str


_TABLE = (
    Switch(
        "JITMOE_CACHE_DIR",
        "",
        "directories of compiled kernels, colon separated: the first is written, further ones are "
        "read-only packs (empty first: $XDG_CACHE_HOME/jitmoe, else ~/.cache/jitmoe)",
    ),
    Switch("JITMOE_NO_CACHE", False, "neither read nor write the disk cache"),
    Switch(
        "JITMOE_DUMP", "", "directory to put source, cubin and log of every kernel used, hits too"
    ),
    Switch(
        "JITMOE_TUNED",
        "",
        "file of this site's tuned plans, which come before those shipped (empty: tuned.json in "
        "the first cache directory; off: neither)",
    ),
    Switch("JITMOE_PRINT_PLAN", False, "print each plan when its kernel is first built"),
    Switch("JITMOE_LINEINFO", False, "compile with line information, for profilers"),
    Switch("JITMOE_TIMEOUT_S", 30.0, "seconds a wait inside a kernel may take before it gives up"),
)
SWITCHES = {switch.name: switch for switch in _TABLE}


def get(name: str) -> bool | float | str:
    """The value of switch `name` now: the variable if it is set and not empty, else the default.

    Raises KeyError for a name that is not in the table and ValueError for text of the wrong kind.
    """
    default = SWITCHES[name].default
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if isinstance(default, bool):
        word = text.lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    if isinstance(default, float):
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {text!r}")
        return number
    return text


def timeout_s() -> float:
    """Budget of a wait inside a kernel. Raises ValueError for text that is no positive number."""
    return float(get("JITMOE_TIMEOUT_S"))


def unknown() -> list[str]:
    """JITMOE_* variables that are set but are no switch: most likely misspelt."""
    return sorted(
        name for name in os.environ if name.startswith("JITMOE_") and name not in SWITCHES
    )
