"""Functions for the ranks and sizes of process groups. Scripts import these functions from Merak's
module of the same name.
"""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry

KINDS = ("data", "model", "pipe", "sequence")
NAMES = {
    f"get_{kind}_parallel_{what}": "grid"
    for kind in KINDS
    for what in ("rank", "world_size", "group")
} | {"is_pipeline_first_stage": "grid", "is_pipeline_last_stage": "grid"}


def __getattr__(name: str) -> Any:
    """Return the function `name`. The engine is loaded when a script first uses one of the
    functions.
    """
    return entry(__name__, NAMES, name)
