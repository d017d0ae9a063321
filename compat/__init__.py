"""The stacks: one folder each. `bridge.stack.registry` finds and loads them, also those of folders
that STAGEBRIDGE_PATH names.
"""

from __future__ import annotations

from bridge.stack.registry import (
    FOLDERS,
    OWN,
    PATH,
    backends,
    candidates,
    faults,
    load,
    names,
    plugins,
    translate,
)

__all__ = [
    "OWN",
    "PATH",
    "backends",
    "candidates",
    "faults",
    "load",
    "names",
    "plugins",
    "translate",
]
__path__ = [*__path__, *FOLDERS]
