"""stagebridge translates configs of training runs between five stacks, and trains from these
configs with an engine of its own.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and "bridge.cli" in sys.orig_argv and not sys.flags.safe_path:
    # Before the first import: under plain `-m` the current directory is first in the path, so a
    # json.py that lies there would be imported instead of the standard library's and run with the
    # user's rights.
    sys.exit(
        "error: python -m bridge.cli imports files of the current directory; run python -P -m stagebridge instead"
    )

from bridge.errors import BridgeError, ConfigError, SourceError, TranslationError, VersionError

# Type checkers take this name for true; `typing` itself is too slow to import for a command that
# only prints its version.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from bridge.engine import initialize
    from bridge.engine.choose import choose
    from bridge.layout.parameters import count_parameters
    from bridge.plan.plan import Plan
    from bridge.translation.lift import lift, lower
    from bridge.translation.translate import Result, translate

__version__ = "0.2.0"
__all__ = [
    "BridgeError",
    "ConfigError",
    "Plan",
    "Result",
    "SourceError",
    "TranslationError",
    "VersionError",
    "choose",
    "count_parameters",
    "initialize",
    "lift",
    "lower",
    "translate",
]

_LAZY = {
    "Plan": "plan",
    "Result": "translation.translate",
    "choose": "engine.choose",
    "count_parameters": "layout.parameters",
    "initialize": "engine",
    "lift": "translation.lift",
    "lower": "translation.lift",
    "translate": "translation.translate",
}


def __getattr__(name: str) -> Any:
    """Return the attribute `name` of the package. The attribute's module is loaded at the first
    use, so that importing the package takes little time.
    """
    return load_late(__name__, _LAZY, name)


def load_late(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Return `name` of the package's module `modules[name]`, which is imported now. Raises `AttributeError` if
    `modules` lacks the name.
    """
    from importlib import import_module

    if name in modules:
        return getattr(import_module(f"{package}.{modules[name]}"), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
