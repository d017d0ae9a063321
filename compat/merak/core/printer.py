"""`AccMetric`, in the module in which Merak has it."""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry

NAMES = {"AccMetric": "metrics"}


def __getattr__(name: str) -> Any:
    """Return the class. The engine is loaded when a script first uses it."""
    return entry(__name__, NAMES, name)
