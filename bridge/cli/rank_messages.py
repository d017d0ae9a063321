"""What a command that starts ranks has of them: the lines that they send, their progress, and their engines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from bridge.cli.progress import Meter
from bridge.cli.terminal import note
from bridge.engine.backends import backends
from bridge.engine.native import BACKEND
from bridge.stack import registry

MARK = "@stagebridge "
"""Prefix of our own output lines, as stacks print to the same stream."""


Fields = dict[str, Any]


class ProgressPrinter:
    """Prints the notes and the progress of ranks on stderr."""

    def __init__(self, what: str = "the runs") -> None:
        self.what = what
        self.meter: Meter | None = None

    def hear(self, message: Fields) -> None:
        """Print a message of the first rank: a note, or its progress."""
        if "at" in message:
            self.meter = self.meter or Meter(self.what)
            self.meter(*message["at"])
        elif self.meter:
            self.meter.clear()
        if "note" in message:
            note(f"  {message['note']}")


@contextmanager
def end_orderly() -> Iterator[None]:
    """Context in which SIGTERM raises `SystemExit`, so that the ranks are ended and temporary files
    removed.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = None
    with suppress(ValueError):  # only the main thread may say what signals do
        before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def load_engines(names: Iterable[str | None]) -> None:
    """Load the native engine and the installed engines of the stacks in `names`."""
    with redirect_stdout(sys.stderr):
        stacks = sorted(name for name in names if name in registry.names())
        for backend in (BACKEND, *backends(*stacks).values()):
            if backend.release is not None:
                backend.load()
