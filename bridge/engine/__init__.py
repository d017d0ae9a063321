"""The native engine: trains a model by a plan on plain PyTorch, stage by stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.engine.beginning import initialize as initialize
else:

    def initialize(*arguments: Any, **settings: Any) -> Any:
        """Return an engine that trains a model by a plan; see `bridge.engine.beginning.initialize`."""
        # The name is there without torch; what it does needs torch.
        from bridge.engine import beginning

        return beginning.initialize(*arguments, **settings)
