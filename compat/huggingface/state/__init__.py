"""What checkpoints of transformers have of their own: the names of parameters."""

from __future__ import annotations

from bridge.state.names import Naming
from compat.huggingface.state.names import Runtime, Saved

NAMINGS: tuple[Naming, ...] = (Saved(), Runtime())
