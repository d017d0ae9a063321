"""Checkpoints in DeepSpeed's formats, read and written without DeepSpeed."""

from __future__ import annotations

from bridge.state.formats import Format
from compat.deepspeed.state.universal import Universal
from compat.deepspeed.state.zero import Zero

FORMATS: tuple[Format, ...] = (Zero(), Universal())
