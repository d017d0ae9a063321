"""Pipeline schedules as pictures: time runs along lines as wide as a page, with repeated parts drawn once
and idle time hatched.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.layout.schedule import Timeline
from bridge.layout.schedule.timeline import Span
from bridge.report.pictures.page import blank, format_of, save
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBERED = 16
"""Largest number of ranks whose boxes are high enough for the numbers of microbatches."""
UNITS, BARE = 72, 288
"""Units of time in one line of a picture: the first if the boxes have numbers, the second if they have none."""
TALL = 60
"""Largest height of all lines in inches. If there are more lines, the title says how many."""
ROW, LINE, GAP = 0.24, 5.4, 0.5
"""Sizes in inches: the largest height of a rank's row, the largest height of all rows of a line, and the space around a line."""
LETTERS, FITTING = 5.5, 14.0
"""Font sizes of labels in points: the largest, and the size at which one letter is as wide as one
unit of time.
"""
NAMED = 0.13
"""Smallest distance in inches between the names of two ranks."""
TICKS = (1, 5, 10, 20)
"""Possible distances between two ticks, in units of time. The first with at most 16 ticks in a line is used."""
IDLE = "#e6e6e6"
Box = tuple[float, float, float]
"""The box of an action: its start in units of time, its rank, and its length in units of time."""


@dataclass(frozen=True)
class PictureLine:
    """A piece of a line: the units of time from `start` to `stop`, drawn `at` units from the left edge.

    `said` is the text on how often the piece is repeated, or empty.
    """

    start: int
    stop: int
    at: int
    said: str = ""

    @property
    def end(self) -> int:
        """Distance of the right edge of the piece from the left edge of the line, in units of time."""
        return self.at + self.stop - self.start


def picture_lines(timeline: Timeline) -> list[list[PictureLine]]:
    """Return the lines of a picture.

    If the whole schedule does not fit, each repeated part is drawn once, with its number of
    repetitions.
    """
    whole = RepeatedPart(0, round(timeline.length))
    # What fits into four lines is drawn whole: looking for repeats saves little there.
    parts = [whole] if whole.stop <= 4 * UNITS else find_repeats(timeline)
    units = UNITS if _shows_numbers(timeline) else BARE
    broken = units // 36
    room = sum(part.stop - part.start + broken * (part.times > 1) for part in parts)
    # Lines of one length: a last one of a few units would leave most of its row empty.
    length = math.ceil(room / math.ceil(room / units)) if room else units
    rows, at = [list[PictureLine]()], 0
    for part in parts:
        text, start = repeat_text(part) if part.times > 1 else "", part.start
        short = length - at < part.stop - start <= length / 4
        # One repeated part a line, so that their texts do not meet, and a short one in one piece.
        if text and (short or any(piece.said for piece in rows[-1])):
            rows, at = [*rows, []], 0
        while start < part.stop:
            if at >= length:
                rows, at = [*rows, []], 0
            label = text and (text if start == part.start else "continued")
            piece = PictureLine(start, min(part.stop, start + length - at), at, label)
            rows[-1].append(piece)
            start, at = piece.stop, piece.end
        at += broken if text else 0
    return [row for row in rows if row]


def draw_picture(timeline: Timeline, path: Path) -> None:
    """Write a picture in the format that the suffix of `path` stands for.

    Raises `BridgeError` if it cannot be drawn.
    """
    format_of(path)
    save(_draw_figure(timeline), path, title_line(timeline))


def _shows_numbers(timeline: Timeline) -> bool:
    return timeline.schedule.ranks <= NUMBERED


def _draw_figure(timeline: Timeline) -> Figure:
    every = picture_lines(timeline)
    high = min(ROW * timeline.schedule.ranks, LINE)
    lines = every[: int(TALL / (high + GAP))]
    figure = blank((high + GAP) * len(lines) + 1.0)
    note = f"\nthe first {len(lines)} of {len(every)} lines" if len(every) > len(lines) else ""
    figure.suptitle(title_line(timeline).replace("; ", "\n", 1) + note, fontsize=10)
    panels: Sequence[Axes] = list(figure.subplots(len(lines), 1, squeeze=False)[:, 0])
    units = max(line[-1].end for line in lines)
    for axes, line in zip(panels, lines, strict=True):
        _draw_line(axes, timeline, line, units)
    panels[-1].set_xlabel(_time_axis_label(timeline), fontsize=8)
    _draw_legend(figure, timeline)
    return figure


def _time_axis_label(timeline: Timeline) -> str:
    """Return the label of the time axis, which also explains the boxes."""
    apart = has_several_stages(timeline)
    boxes = (
        "boxes show stage·microbatch, narrow boxes only the microbatch"
        if apart
        else "boxes show the microbatch"
    )
    if not _shows_numbers(timeline):
        boxes = "boxes are too small for the numbers of microbatches, which --json prints"
    paler = "; paler boxes: later stages of a rank" if apart else ""
    return f"time (one forward of a stage = 1); {boxes}{paler}"


def _draw_line(axes: Axes, timeline: Timeline, line: Sequence[PictureLine], units: int) -> None:
    """Draw one line of the picture.

    All lines have the same scale: the width of the page is `units` of time.
    """
    ranks = timeline.schedule.ranks
    for piece in line:
        _draw_piece(axes, timeline, piece)
        if piece.said:
            _draw_frame(axes, piece, ranks, units)
    step = next((step for step in TICKS if units <= 16 * step), TICKS[-1])
    ticks = dict(_tick_marks(line, step))
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
    # Names of ranks that would touch one another are left out.
    apart = next(2**n for n in range(32) if 2**n * min(ROW, LINE / ranks) >= NAMED)
    marks = range(0, ranks, apart)
    axes.set_yticks(marks, [f"rank {rank}" for rank in marks], fontsize=7)
    # From high to low, so that rank 0 is on top.
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, units)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _tick_marks(line: Sequence[PictureLine], step: int) -> Iterator[tuple[int, str]]:
    """Yield the place and the time of each tick: the start of every piece, and every multiple of `step`.

    A tick that would be too close to the tick before is left out.
    """
    last = -step
    for piece in line:
        for time in (piece.start, *range(-(-piece.start // step) * step, piece.stop + 1, step)):
            place = piece.at + time - piece.start
            if 2 * (place - last) >= step:
                yield place, str(time)
                last = place


def _draw_frame(axes: Axes, piece: PictureLine, ranks: int, units: int) -> None:
    """Draw a frame around a repeated piece, and above it how often it is repeated."""
    from matplotlib.patches import Rectangle

    size = piece.end - piece.at, ranks - 0.04
    axes.add_patch(Rectangle((piece.at, -0.48), *size, fill=False, linewidth=1.2, clip_on=False))
    right = piece.at > units / 2
    axes.annotate(
        piece.said,
        (piece.end if right else piece.at, -0.5),
        (0, 3),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
    )


def _draw_piece(axes: Axes, timeline: Timeline, piece: PictureLine) -> None:
    """Draw the whole piece as idle time, and on top the actions of the ranks."""
    ranks, long = range(timeline.schedule.ranks), piece.end - piece.at
    _draw_boxes(
        axes, [(piece.at, rank, long) for rank in ranks], IDLE, hatch="////", edge="#bdbdbd"
    )
    boxes: dict[tuple[str, float], list[Box]] = {}
    apart = has_several_stages(timeline)
    for rank, row in enumerate(timeline.rows):
        local = timeline.schedule.local(rank)
        first = bisect_right(row, float(piece.start), key=lambda span: span.end)
        last = bisect_left(row, float(piece.stop), key=lambda span: span.start)
        for span in row[first:last]:
            start, end = max(span.start, piece.start), min(span.end, piece.stop)
            # The later of the stages that a rank holds are paler, down to half.
            pale = 0.5 * local.index(span.action.stage) / len(local)
            box = (piece.at + start - piece.start, rank, end - start)
            boxes.setdefault((span.action.kind, pale), []).append(box)
            if _shows_numbers(timeline):
                _draw_label(axes, span, box, apart)
    for (kind, pale), same in boxes.items():
        _draw_boxes(axes, same, _mix_with_white(COLOURS[kind], pale))


def _draw_boxes(
    axes: Axes,
    boxes: Sequence[Box],
    colour: str | tuple[float, float, float],
    hatch: str = "",
    edge: str = "white",
) -> None:
    """Draw boxes of one colour as a single path, because a separate object for each box would take much longer."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners = [
        ((x, y - 0.45), (x + wide, y - 0.45), (x + wide, y + 0.45), (x, y + 0.45), (x, y - 0.45))
        for x, y, wide in boxes
    ]
    codes = (Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY)
    outline = Outline([point for box in corners for point in box], codes * len(boxes))
    # As an artist alone: nobody needs the limits of the data, which take longer to find than the rest.
    axes.add_artist(
        PathPatch(
            outline,
            facecolor=colour,
            edgecolor=edge,
            linewidth=0 if hatch else 0.4,
            hatch=hatch or None,
        )
    )


def _draw_label(axes: Axes, span: Span, box: Box, apart: bool) -> None:
    x, rank, wide = box
    action = span.action
    text = f"{action.stage}·{action.microbatch}" if apart and wide > 1 else f"{action.microbatch}"
    axes.text(
        x + wide / 2,
        rank,
        text,
        ha="center",
        va="center",
        fontsize=min(LETTERS, FITTING * wide / len(text)),
        # It lies within its box, so the layout need not measure it.
        in_layout=False,
    )


def _mix_with_white(colour: str, pale: float) -> tuple[float, float, float]:
    """Return the colour mixed with white. A transparent colour would let the idle time below show through."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part + (1 - part) * pale for part in to_rgb(colour))
    return red, green, blue


def _draw_legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=COLOURS[letter], label=f"{NAMES[letter]} ({letter})")
        for letter in NAMES
        if letter in action_letters(timeline)
    ]
    patches.append(Patch(facecolor=IDLE, edgecolor="#bdbdbd", hatch="////", label="idle"))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False
    )
