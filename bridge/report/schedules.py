"""A schedule as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.layout.schedule import Timeline
from bridge.layout.schedule.timeline import in_flight
from bridge.report import json_types
from bridge.report.exit_codes import Exit
from bridge.report.pictures.schedule_rows import (
    COLOURS,
    NAMES,
    RepeatedPart,
    action_letters,
    find_repeats,
    has_several_stages,
    repeat_text,
    title_line,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CELLS = 100
"""Units of time in a block of text if the output is no terminal."""


def as_json(timeline: Timeline) -> json_types.Scheduled:
    """Return the schedule as the JSON object that docs/json.md describes."""
    it = timeline.schedule
    return {
        "name": it.name,
        "ranks": it.ranks,
        "stages": it.stages,
        "microbatches": it.microbatches,
        "homes": list(it.homes),
        "rows": [[str(action) for action in row] for row in it.rows],
        "starts": [[span.start for span in row] for row in timeline.rows],
        "length": timeline.length,
        "bubble": timeline.bubble,
        "overhead": timeline.overhead,
        "in_flight": [in_flight(row) for row in it.rows],
        "kept": sorted(map(list, it.kept)),
        "exit_code": Exit.CLEAN,
    }


def print_schedule(timeline: Timeline, out: Console, notes: tuple[str, ...] = ()) -> None:
    """Print a schedule."""
    out.print(title_line(timeline), markup=False)
    for note in notes:
        out.print(f"note: {note}", markup=False)
    legend = ", ".join(
        f"{letter} {NAMES[letter]}" for letter in NAMES if letter in action_letters(timeline)
    )
    stage = "stage, " if has_several_stages(timeline) else ""
    out.print(
        f"cells: {stage}action ({legend}), microbatch; a dot is an idle unit of time\n",
        markup=False,
    )
    _print_rows(timeline, out)
    for rank in range(timeline.schedule.ranks):
        stages = ", ".join(map(str, timeline.schedule.local(rank)))
        idle = 1 - sum(span.end - span.start for span in timeline.rows[rank]) / timeline.length
        peak = in_flight(timeline.schedule.rows[rank])
        out.print(f"rank {rank}: stages {stages}; idle {idle:.1%}; {peak} in flight", markup=False)


def _print_rows(timeline: Timeline, out: Console) -> None:
    """Print a row for each rank, in blocks as wide as the terminal. If one block is not enough,
    repeated parts are shown once.
    """
    cells = [_rank_cells(timeline, rank) for rank in range(timeline.schedule.ranks)]
    width = max((len(text) for row in cells for text, _ in row), default=1) + 1
    label = len(f"rank {timeline.schedule.ranks - 1}  ")
    block = max(1, (out.width - label) // width) if out.file.isatty() else CELLS
    length = max(map(len, cells))
    parts = find_repeats(timeline) if length > block else [RepeatedPart(0, length)]
    for part in parts:
        if part.times > 1:
            out.print(f"{repeat_text(part)}:", markup=False, highlight=False)
        for start in range(part.start, part.stop, block):
            for rank, row in enumerate(cells):
                out.print(
                    _cells_line(
                        f"rank {rank}".ljust(label),
                        row[start : min(start + block, part.stop)],
                        width,
                    ),
                    soft_wrap=True,
                )
            out.print()


def _rank_cells(timeline: Timeline, rank: int) -> list[tuple[str, str]]:
    """Return text and action letter for each unit of time of a rank.

    Dashes stand for an action that continues.
    """
    cells, apart = [(".", "")] * round(timeline.length), has_several_stages(timeline)
    for action, start, end in (
        (span.action, round(span.start), round(span.end)) for span in timeline.rows[rank]
    ):
        text = f"{action.stage if apart else ''}{action.kind}{action.microbatch}"
        for place in range(start, end):
            cells[place] = (text if place == start else "-" * len(text), str(action.kind))
    return cells


def _cells_line(label: str, cells: list[tuple[str, str]], width: int) -> Text:
    from rich.text import Text

    line = Text(label)
    for text, letter in cells:
        line.append(text.ljust(width), COLOURS.get(letter))
    return line
