"""The stacks: one folder each. `bridge.stack.registry` finds and loads them, also those of folders
that STAGEBRIDGE_PATH names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.engine.backends import backends
from bridge.stack.registry import FOLDERS, OWN, PATH, candidates, faults, load, names, plugins

if TYPE_CHECKING:
    from bridge.translation.translate import Result

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


def translate(
    source: Any,
    theirs: str,
    to: str,
    *,
    from_version: str | None = None,
    to_version: str | None = None,
    world_size: int | None = None,
    lenient: bool = False,
) -> Result:
    """Read `source` in dialect `theirs` and translate it to dialect `to`. Raises `BridgeError` with
    every problem.
    """
    from bridge.translation.translate import translate

    config = load(theirs).read(source, from_version, world_size, lenient)
    return translate(config, load(to), to_version, world_size)
