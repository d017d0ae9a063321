"""stagebridge: one run, five languages. Translates training configs between stacks and runs them on a native staged engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, ConfigError, SourceError, TranslationError, VersionError

if TYPE_CHECKING:
    from bridge.choice import choose
    from bridge.engine import initialize
    from bridge.plan import Plan
    from bridge.translation import Result, lift, lower, translate

__version__ = "0.1.0"
__all__ = [
    "BridgeError",
    "ConfigError",
    "Plan",
    "Result",
    "SourceError",
    "TranslationError",
    "VersionError",
    "choose",
    "initialize",
    "lift",
    "lower",
    "translate",
]

_LAZY = {
    "Plan": "plan",
    "Result": "translation",
    "choose": "choice",
    "initialize": "engine",
    "lift": "translation",
    "lower": "translation",
    "translate": "translation",
}


def __getattr__(name: str) -> Any:
    """Load the core on first use, so that importing the package costs nothing."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(f"bridge.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
