"""What the command line prints: reports, notes, errors and JSON, with nothing in them that a terminal would act upon."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bridge.clean import brief, clean, clean_block
from bridge.secrets import HIDDEN, hide

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120
"""Columns of a report that does not go to a terminal."""


def say(line: str, stream: Any = None) -> None:
    """Print one line; by default on stdout."""
    print(hide(clean(line)), file=stream or sys.stdout, flush=True)


def note(line: str) -> None:
    """Print one line on stderr."""
    say(line, sys.stderr)


def complain(problems: Iterable[str]) -> None:
    """Print errors on stderr, one a line."""
    for problem in problems:
        print(brief(hide(clean(f"error: {problem}"))), file=sys.stderr, flush=True)


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(HIDDEN.within(content), indent=2, allow_nan=False))


def content(text: str) -> None:
    """Write a converted file to stdout: as it is, but for secrets, and on a terminal for what that would act upon."""
    hidden = HIDDEN.hide(text)
    sys.stdout.write(clean_block(hidden) if sys.stdout.isatty() else hidden)
    sys.stdout.flush()
    if hidden != text:
        note("note: secrets of the file are hidden here; -o OUT writes them")


def console(stream: Any) -> Console:
    """A console on `stream`: colour and the terminal's width on a terminal, neither in a pipe."""
    from rich.console import Console

    class Clean(Console):
        """Prints texts cleaned; cells of tables are cleaned by `bridge.report.table_of`."""

        def print(self, *objects: Any, **options: Any) -> None:
            """As rich does, with texts cleaned."""
            super().print(*(hide(clean_block(item)) if isinstance(item, str) else item for item in objects), **options)

    return Clean(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)
