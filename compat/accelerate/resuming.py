"""How runs that accelerate starts resume from checkpoints."""

from __future__ import annotations

from bridge.stack.checkpoint_side import CheckpointSide


class AccelerateCheckpoints(CheckpointSide):
    """Scripts that use accelerate build the optimizer themselves."""

    grouping = True


SIDE = AccelerateCheckpoints
