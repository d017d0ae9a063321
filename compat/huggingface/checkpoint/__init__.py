"""Checkpoints of transformers' Trainer, and the parameter names of transformers' models."""

from __future__ import annotations

from bridge.checkpoint.interface import Format
from bridge.checkpoint.parameter_names import Naming
from compat.huggingface.checkpoint.names import Runtime, Saved
from compat.huggingface.checkpoint.trainer import Accelerate, Trainer

NAMINGS: tuple[Naming, ...] = (Saved(), Runtime())
FORMATS: tuple[Format, ...] = (Trainer(), Accelerate())
