"""The parameter names of transformers' checkpoints."""

from __future__ import annotations

from bridge.checkpoint.parameter_names import Naming
from compat.huggingface.checkpoints.names import Runtime, Saved

NAMINGS: tuple[Naming, ...] = (Saved(), Runtime())
