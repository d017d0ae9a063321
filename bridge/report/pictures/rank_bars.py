"""Pictures of the memory of ranks: one bar for each group of equal ranks or moment of a step, divided
by kind of memory, and a line for the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.report.pictures.page import blank, format_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[str, str] = {
    "weights": "#4c72b0",
    "gradients": "#55a868",
    "master": "#c7a252",
    "moments": "#b07aa1",
    "activations": "#dd8452",
    "logits": "#c44e52",
    "buffers": "#64b5cd",
    "workspace": "#937860",
    "margins": "#d0d0d0",
}
"""Kinds of memory, each with its colour, in the order of the parts of a bar."""
BARS = 48
"""Largest number of bars of a picture. If there are more, the title says how many."""
BAR, GAP = 0.3, 1.8
"""Sizes in inches: the height of one bar, and the space around all bars."""
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
FAR = 12
"""A device's memory is drawn as a line only up to this multiple of the longest bar; beyond that it is only given as text."""
COLUMNS = 5
"""Largest number of entries in one row of the legend."""
WORDS = 5
"""Largest number of rank ranges that the label of a bar names."""


@dataclass(frozen=True)
class Bar:
    """A bar with its label, and its number of bytes of each kind of memory."""

    label: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.bytes.values())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as `ranks 0-3, 8-11`."""
    runs = []
    # Within a run of neighbours a rank less its place stays the same.
    for _, part in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in part]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    more = f" and {len(runs) - WORDS} more" if len(runs) > WORDS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs[:WORDS])}{more}"


def draw(bars: Sequence[Bar], title: str, scale: str, memory: int | None, path: Path) -> None:
    """Write the picture in the format that the suffix of `path` stands for.

    `scale` says what is counted, and `memory` is the memory of a device in bytes. Raises
    `BridgeError` if the picture cannot be drawn.
    """
    format_of(path)
    largest = _largest(bars)
    figure = blank(BAR * len(largest) + GAP)
    note = f"\nthe {BARS} largest of {len(bars)} bars" if len(bars) > BARS else ""
    figure.suptitle(title + note, fontsize=10)
    axes = figure.subplots()
    most = max((bar.total for bar in bars), default=0)
    unit = next((unit for unit, size in UNITS.items() if most >= size), "KiB")
    kinds = [kind for kind in COLOURS if any(bar.bytes.get(kind) for bar in largest)]
    _bars(axes, largest, kinds, UNITS[unit])
    # A line that is many times as far as the longest bar would leave too little of the bars to be seen.
    near = not memory or memory <= FAR * most
    # An eighth more, for the figure behind the longest bar.
    axes.set_xlim(0, max(most, (memory or 0) if near else 0, 1) / UNITS[unit] * 1.12)
    if memory:
        beyond = "" if near else f", {memory / max(most, 1):,.0f} times the longest bar"
        axes.axvline(
            memory / UNITS[unit],
            color="black",
            linestyle="--",
            linewidth=1.2,
            label=f"memory of a device: {memory / UNITS['GiB']:,.10g} GiB{beyond}",
        )
    axes.set_xlabel(f"{unit} {scale}", fontsize=8)
    axes.tick_params(axis="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    columns = min(len(kinds) + bool(memory), COLUMNS)
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    save(figure, path, title)


def merge_ranks(groups: Sequence[tuple[Sequence[int], Mapping[str, int]]]) -> list[Bar]:
    """Return one bar for all ranks that keep the same bytes, even if the ranks keep different layers."""
    ranks: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for owners, sizes in groups:
        ranks.setdefault(tuple(sizes.items()), []).extend(owners)
    return [Bar(ranks_text(owners), dict(sizes)) for sizes, owners in ranks.items()]


def _largest(bars: Sequence[Bar]) -> list[Bar]:
    """Return the bars that a picture has room for, in the order of `bars`."""
    largest = sorted(range(len(bars)), key=lambda place: -bars[place].total)[:BARS]
    return [bars[place] for place in sorted(largest)]


def figure(number: float) -> str:
    """Return a number as text with three digits, such as `3.00`; from 100 on, without decimals."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def _bars(axes: Axes, bars: Sequence[Bar], kinds: Sequence[str], unit: int) -> None:
    starts = [0.0] * len(bars)
    for kind in kinds:
        sizes = [bar.bytes.get(kind, 0) / unit for bar in bars]
        axes.barh(
            range(len(bars)),
            sizes,
            0.8,
            starts,
            color=COLOURS[kind],
            label=kind,
            edgecolor="white",
            linewidth=0.5,
        )
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for row, bar in enumerate(bars):
        axes.text(starts[row], row, f" {figure(bar.total / unit)}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    # From high to low, so that the first ranks are on top.
    axes.set_ylim(len(bars) - 0.5, -0.5)
