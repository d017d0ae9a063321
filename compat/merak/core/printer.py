"""`AccMetric`, which scripts import from Merak's module of the same name."""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry

NAMES = {"AccMetric": "metrics"}


def __getattr__(name: str) -> Any:
    """Return the class `AccMetric`. The engine is loaded when a script first uses the class."""
    return entry(__name__, NAMES, name)
