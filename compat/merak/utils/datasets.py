"""`DynamicGenDataset`, in the module in which Merak has it."""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry

NAMES = {"DynamicGenDataset": "generated"}


def __getattr__(name: str) -> Any:
    """The class, once a script asks for it."""
    return entry(__name__, NAMES, name)
