"""Tables and remarks for people. On a terminal with 40 columns or more, no character is lost, and
no line ends in blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.files.printable import brief, clean
from bridge.files.secrets import hide

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

GAP = 3
"""Number of blanks between two columns."""
NARROW = 24
"""Least width of a column of sentences. If a column would be narrower, the values of a row are
printed one below the other.
"""
ARROW = "-> "
GLUE = "\ue000"
"""Character that replaces the blank behind an arrow while a text is wrapped, so that no line ends
there. No text has this character, because `clean` escapes it.
"""


@dataclass(frozen=True)
class Hung:
    """A text whose first line is indented by `first` columns, and whose other lines by `rest`
    columns.

    A word that is wider than a line continues on the next line. If `whole`, it stays whole instead,
    on a line of its own; such a text is printed with `soft_wrap`.
    """

    text: Text
    first: int = 0
    rest: int = 0
    whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines of the text."""
        indent, width = self.first, options.max_width - max(self.first, self.rest)
        for line in wrap_text(self.text, console, width, self.whole):
            yield blanks(indent) + line
            indent = self.rest


def blanks(count: int) -> Text:
    """A text of `count` blanks."""
    from rich.text import Text

    return Text(" " * count)


def markup_text(markup: str) -> Text:
    """A text from markup, with secrets hidden, control characters escaped and long words cut."""
    from rich.text import Text

    # In this order: secrets are found by their whole text, so nothing may be cut before they are
    # hidden.
    return Text.from_markup(brief(hide(clean(markup))))


def wrap_text(text: Text, console: Console, width: int, whole: bool = False) -> list[Text]:
    """Wrap `text` into lines of at most `width` columns, without blanks at line ends. An arrow and
    the value behind it stay on one line. If `whole`, a word that is wider than a line stays whole.
    """
    glue_text = text.copy()
    glue_text.plain = glue_text.plain.replace(ARROW, f"->{GLUE}")
    if whole:
        lines = list(glue_text.divide(_breaks(glue_text.plain, width)))
    else:
        lines = list(glue_text.wrap(console, max(8, width), overflow="fold"))
    for line in lines:
        line.plain = line.plain.replace(GLUE, " ")
        line.rstrip()
    return lines


def _breaks(text: str, width: int) -> Iterator[int]:
    """Yield the positions in `text` at which a new line begins, for lines of at most `width`
    columns.
    """
    from rich.cells import cell_len

    used = 0
    for word in re.finditer(r"\S+\s*", text):
        if used and used + cell_len(word[0].rstrip()) > width:
            yield word.start()
            used = 0
        used += cell_len(word[0])


@dataclass
class Grid:
    """A table with aligned columns. If the width is too small for the columns, the values of a row
    are printed one below the other, each with the name of the column. With `numbers` all columns
    but the first are aligned to the right. Heads are underlined if `ruled`. Cells are markup.
    """

    title: str
    columns: Sequence[str]
    numbers: bool = False
    caption: str = ""
    ruled: bool = True
    rows: list[tuple[list[Text], str]] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row of cells, from the left; a short row has empty cells at its end."""
        self.rows.append(([markup_text(cell) for cell in cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield title, heads, rows and caption."""
        if self.title:
            yield Hung(markup_text(f"[bold]{self.title}[/]"))
        widths = self._widths(options.max_width)
        yield from self._align_rows(console, widths) if widths else self._stack_rows()
        if self.caption:
            yield Hung(markup_text(self.caption), 1, 1)

    def _widths(self, width: int) -> list[int] | None:
        """Return the widths of the columns. Return None if a word does not fit into its column, or
        if a column of sentences would be too narrow.
        """
        from rich.cells import cell_len
        from rich.text import Text

        columns = [[Text(head)] for head in self.columns]
        for cells, _ in self.rows:
            for column, cell in zip(columns, cells, strict=False):
                column.append(cell)
        widths = [
            max(line.cell_len for cell in column for line in cell.split("\n")) for column in columns
        ]
        least = widths
        if not self.numbers:
            # A column must hold its longest word, and NARROW if its text is as long: prose in a
            # narrow column is hard to read.
            words = [[word for cell in column for word in cell.plain.split()] for column in columns]
            longest = [max(map(cell_len, column), default=0) for column in words]
            least = [max(low, min(high, NARROW)) for low, high in zip(longest, widths, strict=True)]
        # One blank stands before the first column.
        room = width - 1 - GAP * (len(columns) - 1)
        spare, short = room - sum(least), sum(widths) - sum(least)
        if spare < 0:
            return None
        # Room beyond the least widths goes to columns in proportion to what each lacks.
        share = min(1.0, spare / short) if short else 1.0
        return [low + int((high - low) * share) for low, high in zip(least, widths, strict=True)]

    def _align_rows(self, console: Console, widths: Sequence[int]) -> Iterator[Text]:
        from rich.text import Text

        if any(self.columns):
            yield self._line([Text(head, style="bold") for head in self.columns], widths)
            if self.ruled:
                yield Text(" " + "─" * (sum(widths) + GAP * (len(widths) - 1)))
        for cells, style in self.rows:
            parts = [
                wrap_text(cell, console, width) for cell, width in zip(cells, widths, strict=False)
            ]
            for number in range(max(map(len, parts), default=0)):
                line = self._line(
                    [part[number] if number < len(part) else Text() for part in parts], widths
                )
                line.stylize(style)
                yield line

    def _line(self, cells: Sequence[Text], widths: Sequence[int]) -> Text:
        line = blanks(1)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=False)):
            gap, rest = GAP if place else 0, width - cell.cell_len
            # A text that begins with a cell would take on the cell's style, so blanks stand first
            # even if there are none.
            if self.numbers and place:
                line += blanks(gap + rest) + cell
            else:
                line += blanks(gap) + cell + blanks(rest)
        line.rstrip()
        return line

    def _stack_rows(self) -> Iterator[Hung]:
        from rich.text import Text

        for cells, style in self.rows:
            for place, cell in enumerate(cells):
                if place and not cell.plain:
                    continue
                head = Text(f"{self.columns[place]}: " if place and self.columns[place] else "")
                text = head + cell
                text.stylize(style)
                yield Hung(text, 3 if place else 1, 5)
