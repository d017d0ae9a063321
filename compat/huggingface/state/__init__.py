"""The parameter names of transformers' checkpoints."""

from __future__ import annotations

from bridge.state.names import Naming
from compat.huggingface.state.names import Runtime, Saved

NAMINGS: tuple[Naming, ...] = (Saved(), Runtime())
