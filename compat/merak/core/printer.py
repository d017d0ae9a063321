"""`AccMetric`, in the module where Merak has it."""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry

NAMES = {"AccMetric": "metrics"}


def __getattr__(name: str) -> Any:
    """The class, loaded when a script first uses it."""
    return entry(__name__, NAMES, name)
