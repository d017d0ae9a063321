"""`set_tp_layer_lists`, in the module in which Merak has it."""

from __future__ import annotations

from typing import Any

import compat.merak


def __getattr__(name: str) -> Any:
    """The function, once a script asks for it."""
    if name != "set_tp_layer_lists":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has set_tp_layer_lists")
    return compat.merak.set_tp_layer_lists
