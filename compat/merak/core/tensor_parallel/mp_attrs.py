"""`set_tp_layer_lists`, in the module in which Merak has it."""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry

NAMES = {"set_tp_layer_lists": "launch"}


def __getattr__(name: str) -> Any:
    """Return the function. The engine is loaded when a script first uses it."""
    return entry(__name__, NAMES, name)
