"""Checkpoints in DeepSpeed's formats, read and written without DeepSpeed."""

from __future__ import annotations

from bridge.checkpoint.interface import Format
from compat.deepspeed.checkpoint.universal import Universal
from compat.deepspeed.checkpoint.zero import Zero
from compat.deepspeed.names import MODULES, Names, module

FORMATS: tuple[Format, ...] = (Zero(), Universal())


def __getattr__(name: str) -> Names:
    """Return a module of DeepSpeed's own package `checkpoint`, whose name this package shares."""
    if (path := f"checkpoint.{name}") in MODULES:
        return module(path)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
