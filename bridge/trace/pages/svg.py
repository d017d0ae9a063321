"""SVG figures of a page: lines over steps, and maps with a cell for each layer and step. The
page's style sheet sets the colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escaped

import numpy as np

from bridge.files.printable import clean
from bridge.trace.segments import Floats

POINTS = 300
"""Maximum number of points of a line. If there are more steps, several steps share a point, which
shows their smallest and largest value.
"""
COLUMNS, ROWS = 120, 64
"""Maximum number of columns (steps) and rows (layers) of a map. If there are more, several share a
cell, which shows the worst value.
"""
WIDE, HIGH, LEFT = 960, 170, 190
CELL = 14
LEVELS = 5
"""Number of different heights to which a cell can be filled."""
DIGITS = 4
"""Minimum number of digits of a label on an axis. If two labels of an axis would be equal, all get
more digits.
"""
DASHES = ("", "7 4", "2 3", "9 3 2 3")


def escape_text(value: object) -> str:
    """Return a value as text for the page, escaped because it may come from a log."""
    return escaped(clean(str(value)), quote=True)


@dataclass(frozen=True)
class Curve:
    """A line of a figure: its label, and a value for each step."""

    label: str
    steps: Sequence[int]
    values: Floats


def draw_chart(title: str, curves: Sequence[Curve], marks: Mapping[int, str]) -> str:
    """Return a figure with one line for each of `curves`, told apart by dashes, and a legend.
    `marks` are captions, by the step at which they stand.
    """
    curves = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not curves:
        return ""
    steps = [step for curve in curves for step in curve.steps]
    values = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    scale = _Scale(min(steps), max(steps), float(values.min()), float(values.max()))
    parts = [
        *_draw_frame(scale),
        *(part for at, curve in enumerate(curves) for part in _draw_line(curve, at, scale)),
    ]
    for step, words in marks.items():
        x = scale.x(step)
        parts.append(
            f'<path class="mark" d="M{x:.1f} 8V{HIGH}"/><text class="mark" x="{x + 4:.1f}" y="10">{escape_text(words)}</text>'
        )
    label = escape_text(f"{title}: " + "; ".join(_curve_text(curve) for curve in curves))
    return (
        f'<figure><figcaption>{escape_text(title)}</figcaption><svg viewBox="0'
        f' 0 {WIDE} {HIGH + 26}" role="img" aria-label="{label}">'
        f"<title>{label}</title>{''.join(parts)}</svg><p class='legend'>{_draw_legend(curves)}</p></figure>"
    )


@dataclass(frozen=True)
class _Scale:
    """The axes of a figure: the coordinates of steps and values. The axis of values is logarithmic
    if they span more than two orders of magnitude.
    """

    first: int
    last: int
    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        return self.low > 0 and self.high / self.low > 100

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / max(self.last - self.first, 1) * (WIDE - LEFT - 20)

    def y(self, value: float) -> float:
        ends = (
            (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        )
        at = math.log(value) if self.logarithmic else value
        # 8 below and 16 above are left for words.
        return HIGH - 8 - (at - ends[0]) / ((ends[1] - ends[0]) or 1) * (HIGH - 24)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers][:: max(1, len(powers) // 4)]
        return sorted({self.low, (self.low + self.high) / 2, self.high})


def _draw_frame(scale: _Scale) -> Iterable[str]:
    ticks = scale.ticks()
    for value, label in zip(ticks, _distinct_labels(ticks), strict=True):
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDE - 20}"/>'
        yield f'<text class="at" x="{LEFT - 8}" y="{y + 4:.1f}">{label}</text>'
    for step in sorted({scale.first, (scale.first + scale.last) // 2, scale.last}):
        yield f'<text class="below" x="{scale.x(step):.1f}" y="{HIGH + 16}">step {step}</text>'


def _distinct_labels(values: Sequence[float]) -> list[str]:
    """Return the values as labels, all with as many digits as are needed so that no two labels are
    equal.
    """
    labels = (
        [f"{value:.{digits}g}" for value in values] for digits in range(DIGITS, 2 * DIGITS + 4)
    )
    return next(
        (texts for texts in labels if len(set(texts)) == len(texts)), list(map(repr, values))
    )


def _draw_line(curve: Curve, at: int, scale: _Scale) -> Iterable[str]:
    pieces: list[list[str]] = [[]]
    gaps: list[int] = []
    for step, value in _thin_points(curve):
        if math.isfinite(value):
            pieces[-1].append(f"{scale.x(step):.1f} {scale.y(value):.1f}")
        # A value that is not finite ends the piece: no line is drawn across it.
        elif pieces[-1]:
            pieces.append([])
            gaps.append(step)
    for piece in filter(None, pieces):
        shape = f"M{'L'.join(piece)}" if len(piece) > 1 else f"M{piece[0]}h1"
        yield f'<path class="line line{at % len(DASHES)}" stroke-dasharray="{DASHES[at % len(DASHES)]}" d="{shape}"/>'
    for step in gaps[:20]:
        yield f'<text class="mark" x="{scale.x(step):.1f}" y="{HIGH - 2}">NaN</text>'


def _thin_points(curve: Curve) -> Iterable[tuple[int, float]]:
    """Yield the points of a curve. Of a long curve, yield the smallest and largest value of each
    bin of steps, and all values that are not finite.
    """
    size = max(1, math.ceil(len(curve.steps) / POINTS))
    for start in range(0, len(curve.steps), size):
        values = curve.values[start : start + size]
        finite = np.isfinite(values)
        if not finite.all():
            yield curve.steps[start + int((~finite).argmax())], math.nan
        if finite.any():
            ends = sorted(
                {
                    int(np.where(finite, values, np.inf).argmin()),
                    int(np.where(finite, values, -np.inf).argmax()),
                }
            )
            yield from ((curve.steps[start + place], float(values[place])) for place in ends)


def _curve_text(curve: Curve) -> str:
    finite = np.isfinite(curve.values).nonzero()[0]
    first, last = (
        f"{curve.values[at]:.4g} in step {curve.steps[at]}" for at in (finite[0], finite[-1])
    )
    return f"{curve.label}: {first}, {last}"


def _draw_legend(curves: Sequence[Curve]) -> str:
    rows = (
        f'<svg class="key" viewBox="0 0 40 8"><path class="line line{at % len(DASHES)}"'
        f' stroke-dasharray="{DASHES[at % len(DASHES)]}" d="M0 4H40"/></svg> {escape_text(_curve_text(curve))}'
        for at, curve in enumerate(curves)
    )
    return "<br>".join(rows)


@dataclass(frozen=True)
class Map:
    """A map: for each layer and step the level of a cell, from 0 to 4, or -1 if nothing was
    logged. `label` names the ranks. `frames` are the cells with a frame, each as layer, step and
    caption.
    """

    label: str
    layers: Sequence[str]
    steps: Sequence[int]
    levels: np.ndarray[tuple[int, ...], np.dtype[np.int8]]
    frames: Sequence[tuple[str, int, str]] = ()


def draw_map(panel: Map) -> str:
    """Return a map as SVG. The higher the level, the more of the cell is filled; each level also
    has a colour.
    """
    rows, columns = (
        _divide_into_bins(len(panel.layers), ROWS),
        _divide_into_bins(len(panel.steps), COLUMNS),
    )
    # Of cells that fall into one, the worst is shown.
    levels = np.maximum.reduceat(np.maximum.reduceat(panel.levels, rows, axis=0), columns, axis=1)
    width = (WIDE - LEFT - 20) / len(columns)
    high = len(rows) * CELL
    parts = [*_draw_names(panel, rows), *_draw_cells(levels, width)]
    for at in sorted({0, len(columns) // 2, len(columns) - 1}):
        x, step = LEFT + (at + 0.5) * width, panel.steps[columns[at]]
        parts.append(f'<text class="below" x="{x:.1f}" y="{high + 40}">step {step}</text>')
    for layer, step, words in panel.frames:
        parts.append(_mark_cell(panel, layer, step, words, rows, columns, width))
    text = f"{panel.label}: {int((levels >= 2).sum())} of {levels.size} cells have level 2 or more"
    return (
        f'<figure><figcaption>{escape_text(panel.label)}</figcaption><svg viewBox="0 0 {WIDE} {high + 44}" role="img"'
        f' aria-label="{escape_text(text)}"><title>{escape_text(text)}</title>{"".join(parts)}</svg></figure>'
    )


def _divide_into_bins(count: int, most: int) -> list[int]:
    """Divide `count` items into at most `most` bins of neighbours. Returns the index of the first
    item of each bin.
    """
    number = min(count, most)
    return [at * count // number for at in range(number)]


def _draw_names(panel: Map, rows: Sequence[int]) -> Iterable[str]:
    ends = [*rows[1:], len(panel.layers)]
    for at, (first, end) in enumerate(zip(rows, ends, strict=True)):
        name = panel.layers[first] or "the run"
        last, rest = panel.layers[end - 1], end - first - 1
        whole = f"{name} to {last}" if rest else name
        short = name if len(name) <= 26 else f"…{name[-25:]}"
        more = f" +{rest}" if rest else ""
        yield (
            f'<text class="at" x="{LEFT - 8}"'
            f' y="{24 + at * CELL + 11}"><title>{escape_text(whole)}</title>{escape_text(short + more)}</text>'
        )


def _draw_cells(
    levels: np.ndarray[tuple[int, ...], np.dtype[np.int8]], width: float
) -> Iterable[str]:
    """Yield one SVG path for each level, with the filled part of all cells of this level."""
    for level in range(LEVELS):
        high = (CELL - 2) * (level + 1) / LEVELS
        places = zip(*(indices.tolist() for indices in (levels == level).nonzero()), strict=True)
        shapes = [
            f"M{LEFT + column * width:.1f} {24 + row * CELL + CELL - 1 - high:.1f}v{high:.1f}"
            for row, column in places
        ]
        if shapes:
            wide = f'stroke-width="{max(width - 0.8, 0.8):.1f}" transform="translate({width / 2:.2f} 0)"'
            yield f'<path class="cell level{level}" {wide} d="{"".join(shapes)}"/>'


def _mark_cell(
    panel: Map,
    layer: str,
    step: int,
    words: str,
    rows: Sequence[int],
    columns: Sequence[int],
    width: float,
) -> str:
    place, time = panel.layers.index(layer), panel.steps.index(step)
    row, column = (
        int(np.searchsorted(bins, at, "right")) - 1 for bins, at in ((rows, place), (columns, time))
    )
    x, y = LEFT + column * width, 24 + row * CELL
    end = "end" if x > WIDE / 2 else "start"
    return (
        f'<path class="mark" d="M{x + width / 2:.1f} 16V{y}"/><rect class="mark" x="{x - 1:.1f}" y="{y}" width="{width + 2:.1f}"'
        f' height="{CELL}"/><text class="mark" style="text-anchor:{end}" x="{x:.1f}" y="12">{escape_text(words)}</text>'
    )
