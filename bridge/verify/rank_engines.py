"""Engines that ranks need, loaded before the ranks are forked."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout

from bridge.engine.backends import backends
from bridge.engine.native import BACKEND
from bridge.stack import registry


def load_engines(names: Iterable[str | None]) -> None:
    """Load the native engine and the installed engines of the stacks in `names`."""
    with redirect_stdout(sys.stderr):
        stacks = sorted(name for name in names if name in registry.names())
        for backend in (BACKEND, *backends(*stacks).values()):
            if backend.release is not None:
                backend.load()
