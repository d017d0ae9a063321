"""Tables and remarks for people: from 40 columns on no character is lost, and no line ends in blanks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.clean import brief, clean
from bridge.secrets import hide

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

GAP = 3
"""Blanks between two columns."""
NARROW = 24
"""Width that a column of sentences needs, or the values of a row stand one under the other."""


@dataclass(frozen=True)
class Hung:
    """A text whose lines begin `first` columns from the left, and all but the first `rest` columns."""

    text: Text
    first: int = 0
    rest: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Its lines, one by one; a word that is wider than a line goes on in the next."""
        indent = self.first
        for line in wrapped(self.text, console, options.max_width - max(self.first, self.rest)):
            yield blanks(indent) + line
            indent = self.rest


def blanks(count: int) -> Text:
    """So many blanks."""
    from rich.text import Text

    return Text(" " * count)


def marked(markup: str) -> Text:
    """A text from markup, of which what comes from an input is hidden, escaped and kept short."""
    from rich.text import Text

    return Text.from_markup(brief(hide(clean(markup))))


def wrapped(text: Text, console: Console, width: int) -> list[Text]:
    """The lines of a text of that width, without blanks at their ends."""
    lines = list(text.wrap(console, max(8, width), overflow="fold"))
    for line in lines:
        line.rstrip()
    return lines


@dataclass
class Grid:
    """A table: aligned columns where the width allows that, else the values of a row one under the other, each by its name.

    With `numbers` all columns but the first stand on the right; heads are underlined if `ruled`. Cells are markup.
    """

    title: str
    columns: Sequence[str]
    numbers: bool = False
    caption: str = ""
    ruled: bool = True
    rows: list[tuple[list[Text], str]] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "") -> None:
        """One row, from the left."""
        self.rows.append(([marked(cell) for cell in cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Title, heads, rows and caption."""
        if self.title:
            yield Hung(marked(f"[bold]{self.title}[/]"))
        widths = self._widths(options.max_width)
        yield from self._aligned(console, widths) if widths else self._stacked()
        if self.caption:
            yield Hung(marked(self.caption), 1, 1)

    def _cells(self, place: int) -> Iterator[Text]:
        return (cells[place] for cells, _ in self.rows if place < len(cells))

    def _widths(self, width: int) -> list[int] | None:
        """Widths of the columns; None if a word does not fit into one, or sentences would stand in too narrow a column."""
        from rich.text import Text

        heads = [Text(head) for head in self.columns]
        columns = [[heads[place], *self._cells(place)] for place in range(len(heads))]
        wanted = [max(line.cell_len for cell in column for line in cell.split("\n")) for column in columns]
        least = [max(_longest(cell) for cell in column) for column in columns]
        least = wanted if self.numbers else [max(low, min(high, NARROW)) for low, high in zip(least, wanted, strict=True)]
        room = width - 1 - GAP * (len(columns) - 1)
        spare, short = room - sum(least), sum(wanted) - sum(least)
        if spare < 0:
            return None
        share = min(1.0, spare / short) if short else 1.0
        return [low + int((high - low) * share) for low, high in zip(least, wanted, strict=True)]

    def _aligned(self, console: Console, widths: Sequence[int]) -> Iterator[Text]:
        from rich.text import Text

        if any(self.columns):
            yield self._line([Text(head, style="bold") for head in self.columns], widths)
            if self.ruled:
                yield Text(" " + "─" * (sum(widths) + GAP * (len(widths) - 1)))
        for cells, style in self.rows:
            parts = [wrapped(cell, console, width) for cell, width in zip(cells, widths, strict=False)]
            for number in range(max(map(len, parts), default=0)):
                line = self._line([part[number] if number < len(part) else Text() for part in parts], widths)
                line.stylize(style)
                yield line

    def _line(self, cells: Sequence[Text], widths: Sequence[int]) -> Text:
        line = blanks(1)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=False)):
            rest, right = width - cell.cell_len, self.numbers and place > 0
            line += blanks((GAP if place else 0) + (rest if right else 0)) + cell + blanks(0 if right else rest)
        line.rstrip()
        return line

    def _stacked(self) -> Iterator[Hung]:
        from rich.text import Text

        for cells, style in self.rows:
            for place, cell in enumerate(cells):
                if place and not cell.plain:
                    continue
                head = Text(f"{self.columns[place]}: " if place and self.columns[place] else "")
                text = head + cell
                text.stylize(style)
                yield Hung(text, 3 if place else 1, 5)


def _longest(cell: Text) -> int:
    """The width of the longest word."""
    from rich.cells import cell_len

    return max(map(cell_len, cell.plain.split()), default=0)
