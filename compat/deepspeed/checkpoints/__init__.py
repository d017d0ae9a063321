"""Checkpoints in DeepSpeed's formats, read and written without DeepSpeed."""

from __future__ import annotations

from bridge.checkpoint.interface import Format
from compat.deepspeed.checkpoints.universal import Universal
from compat.deepspeed.checkpoints.zero import Zero

FORMATS: tuple[Format, ...] = (Zero(), Universal())
