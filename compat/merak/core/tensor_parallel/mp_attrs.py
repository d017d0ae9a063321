"""`set_tp_layer_lists`, which scripts import from Merak's module of the same name."""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry

NAMES = {"set_tp_layer_lists": "launch"}


def __getattr__(name: str) -> Any:
    """Return the function `set_tp_layer_lists`. The engine is loaded when a script first uses the
    function.
    """
    return entry(__name__, NAMES, name)
