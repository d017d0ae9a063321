"""Finds the training run that a command starts: launchers, wrappers, inner shells and sizes, from one table."""

from __future__ import annotations

from bridge.shell.launchers.find import LaunchWord, Walk, walk
from bridge.shell.launchers.sizes import list_unknown_options, ranks
from bridge.shell.launchers.tables import BATCH_SYSTEM, DIRECTIVE, JOB_LINE, STARTERS

__all__ = [
    "BATCH_SYSTEM",
    "DIRECTIVE",
    "JOB_LINE",
    "STARTERS",
    "LaunchWord",
    "Walk",
    "list_unknown_options",
    "ranks",
    "walk",
]
