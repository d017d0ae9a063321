"""Consoles: where reports are printed, without secrets and control characters."""

from __future__ import annotations

import os
import re
from typing import IO, TYPE_CHECKING, Any, cast

from bridge.files.printable import clean_block
from bridge.files.secrets import hide

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120
"""Columns of a report that does not go to a terminal, unless COLUMNS is set."""
LEAST = 40
"""Least number of columns of a report."""


class Trimmed:
    """An output stream that is not a terminal; spaces at line ends are removed."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text without spaces at line ends."""
        self.stream.write(BLANK_ENDS.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


BLANK_ENDS = re.compile(r" +(?=\n)")


def console(stream: Any) -> Console:
    """Return a console on `stream`. On a terminal it has colour and the terminal's width."""
    from rich.console import Console

    class Clean(Console):
        """A console that prints texts without secrets and control characters.

        Cells of tables are cleaned by `bridge.report.tables`.
        """

        def print(self, *objects: Any, **options: Any) -> None:
            """Print like rich, with texts cleaned."""
            super().print(
                *(hide(clean_block(item)) if isinstance(item, str) else item for item in objects),
                **options,
            )

    # rich fills rows of tables with blanks, which a diff of two reports would show.
    file = stream if stream.isatty() else cast("IO[str]", Trimmed(stream))
    return Clean(file=file, width=_width(stream), highlight=False)


def _width(stream: Any) -> int | None:
    """Return the number of columns of a report, from COLUMNS; None: the width of the terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(LEAST, min(int(columns), 1000))
    return None if stream.isatty() else PIPE_WIDTH
