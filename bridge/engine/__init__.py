"""The native engine: trains a model by a plan on plain PyTorch, stage by stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge import load_late

if TYPE_CHECKING:
    from bridge.engine.beginning import initialize as initialize


def __getattr__(name: str) -> Any:
    """Return `initialize`, whose module needs torch, and without which a config is read."""
    return load_late(__name__, {"initialize": "beginning"}, name)
