"""Checkpoints in DeepSpeed's formats, read and written without DeepSpeed."""

from __future__ import annotations

from bridge.checkpoint.interface import Format
from compat.deepspeed.checkpoint.universal import Universal
from compat.deepspeed.checkpoint.zero import Zero

FORMATS: tuple[Format, ...] = (Zero(), Universal())
