"""What a command that starts ranks has of them: the lines that they send, their progress, and their engines."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import Any

from bridge.engine.backends import backends
from bridge.engine.native import BACKEND
from bridge.stack import registry

MARK = "@stagebridge "
"""Prefix of our own output lines, as stacks print to the same stream."""


Fields = dict[str, Any]


def load_engines(names: Iterable[str | None]) -> None:
    """Load the native engine and the installed engines of the stacks in `names`."""
    with redirect_stdout(sys.stderr):
        stacks = sorted(name for name in names if name in registry.names())
        for backend in (BACKEND, *backends(*stacks).values()):
            if backend.release is not None:
                backend.load()
