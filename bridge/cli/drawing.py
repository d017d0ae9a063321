"""Pipeline schedules as pictures: lines of time as wide as a page, repeated parts drawn once, idle time hatched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.pictures import blank, format_of, save
from bridge.cli.schedule import COLOURS, NAMES, Part, again, letters, repeated, several, title
from bridge.layout.schedule import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = 72
"""Number of units of time in a line."""
LINES = 40
"""Largest number of lines of a picture. If there are more, the title says how many."""
ROW, GAP = 0.24, 0.5
"""Sizes in inches: the height of one rank, and the space around the ranks of one line."""
LETTERS, FITTING = 5.5, 14.0
"""Font sizes of labels in points: the largest, and the one that fits for one letter in one unit of
time.
"""
IDLE = "#e6e6e6"


@dataclass(frozen=True)
class Line:
    """The first and the last unit of time in one line of the picture, and the text above the line.
    """

    start: int
    stop: int
    said: str = ""


def lines(found: Timeline) -> list[Line]:
    """Return the lines of a picture.

    If the whole schedule does not fit, each repeated part is drawn once, with its number of
    repetitions.
    """
    whole = Part(0, round(found.length))
    # Up to four lines are drawn whole: looking for repeats saves little there.
    parts = [whole] if whole.stop <= 4 * UNITS else repeated(found)
    rows = list[Line]()
    for part in parts:
        said = again(part) if part.times > 1 else ""
        # Lines of one length: a last one of a few units would leave most of its row empty.
        length = part.stop - part.start
        units = math.ceil(length / math.ceil(length / UNITS)) if length else UNITS
        starts = range(part.start, part.stop, units)
        rows += [
            Line(start, min(start + units, part.stop), said if start == part.start else "")
            for start in starts
        ]
    return rows


def draw(found: Timeline, path: Path) -> None:
    """Write a picture in the format that the suffix of `path` stands for.

    Raises `BridgeError` if it cannot be drawn.
    """
    format_of(path)
    save(_figure(found), path, title(found))


def _figure(found: Timeline) -> Figure:
    every = lines(found)
    shown = every[:LINES]
    height = (ROW * found.schedule.ranks + GAP) * len(shown) + 1.0
    figure = blank(height)
    left = f"\nthe first {LINES} of {len(every)} lines" if len(every) > LINES else ""
    figure.suptitle(title(found).replace("; ", "\n", 1) + left, fontsize=10)
    panels: Sequence[Axes] = list(figure.subplots(len(shown), 1, squeeze=False)[:, 0])
    units = max(line.stop - line.start for line in shown)
    for axes, line in zip(panels, shown, strict=True):
        _line(axes, found, line, units)
    panels[-1].set_xlabel("time (one forward of a stage = 1)", fontsize=8)
    _legend(figure, found)
    return figure


def _line(axes: Axes, found: Timeline, line: Line, units: int) -> None:
    """Draw one line of the picture.

    All lines have the same scale: the width of the page is `units` of time.
    """
    ranks, length = found.schedule.ranks, line.stop - line.start
    # Idle time lies below the whole line, and what ranks do covers it.
    axes.barh(
        range(ranks),
        length,
        0.9,
        line.start,
        color=IDLE,
        hatch="////",
        edgecolor="#bdbdbd",
        linewidth=0,
    )
    _bars(axes, found, line)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=7)
    # From high to low, so that rank 0 is on top.
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(line.start, line.start + units)
    axes.set_xticks(
        [
            tick
            for tick in axes.get_xticks()
            if line.start <= tick <= line.stop and tick == round(tick)
        ]
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if line.said:
        axes.set_title(line.said, fontsize=8, loc="left")


def _bars(axes: Axes, found: Timeline, line: Line) -> None:
    apart = several(found)
    for rank, row in enumerate(found.rows):
        local = found.schedule.local(rank)
        spans, shades = list[tuple[float, float]](), list[tuple[float, float, float]]()
        for span in row:
            start, end = max(span.start, line.start), min(span.end, line.stop)
            if end <= start:
                continue
            spans.append((start, end - start))
            # The later of the stages that a rank holds are paler, down to half.
            pale = 0.5 * local.index(span.action.stage) / len(local)
            shades.append(_paler(COLOURS[str(span.action.kind)], pale))
            label = (
                f"{span.action.stage}·{span.action.microbatch}"
                if apart and end - start > 1
                else f"{span.action.microbatch}"
            )
            size = min(LETTERS, FITTING * (end - start) / len(label))
            axes.text(
                (start + end) / 2,
                rank,
                label,
                ha="center",
                va="center",
                fontsize=size,
                color="black",
                # It lies within its bar, so the layout need not measure it.
                in_layout=False,
            )
        # One collection for a row: an object for each bar takes most of the time.
        axes.broken_barh(
            spans, (rank - 0.45, 0.9), facecolors=shades, edgecolor="white", linewidth=0.4
        )


def _paler(colour: str, pale: float) -> tuple[float, float, float]:
    """Return the colour mixed with white. Transparent, it would let idle time below show."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part + (1 - part) * pale for part in to_rgb(colour))
    return red, green, blue


def _legend(figure: Figure, found: Timeline) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=COLOURS[letter], label=f"{NAMES[letter]} ({letter})")
        for letter in NAMES
        if letter in letters(found)
    ]
    patches.append(Patch(facecolor=IDLE, edgecolor="#bdbdbd", hatch="////", label="idle"))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False
    )
