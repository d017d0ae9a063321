"""Tables and the plot of the multi-stage guide: worked out by Fast-LLM's own rules, and asked of its dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import Any

from markdown_text import code, table

import compat
from bridge.errors import BridgeError

STAGES = 8
"""Stages in the guide's examples."""


# Traffic of a step


@dataclass(frozen=True)
class Counts:
    """Collectives of one stage's size in one optimizer step, on each rank of a data group."""

    gathers: int
    scatters: int


def counts(
    weights: int, grads: int, depth: int = 1, breadth: int = 1, stages: int = STAGES
) -> Counts:
    """Gathers and reduce-scatters of a step with so many buffers, by Fast-LLM's order of work.

    A stage is gathered when another one took its weight buffer, or once after the optimizer's step. It is reduced at its last
    backward pass before another stage takes its gradient buffer, else at the last one of the step
    (multi_stage.py: _get_buffer_placement; schedule/schedule.py: _setup_restore_steps, _setup_reduce_steps).
    """
    visits = [
        stage
        for _ in range(depth)
        for way in (1, -1)
        for stage in range(stages)[::way]
        for _ in range(breadth)
    ]
    backward = [
        stage for _ in range(depth) for stage in range(stages)[::-1] for _ in range(breadth)
    ]
    return Counts(_changes(visits, min(weights, stages)), _changes(backward, min(grads, stages)))


def _changes(visits: Sequence[int], buffers: int) -> int:
    """How often a buffer comes to hold another stage."""
    holder: dict[int, int] = {}
    changes = 0
    for stage in visits:
        changes += holder.get(stage % buffers) != stage
        holder[stage % buffers] = stage
    return changes


def bytes_of(weights: int, grads: int) -> str:
    """Bytes for each parameter of a rank: Adam, bf16 weights, fp32 gradients, stages of one size, d data ranks."""
    whole = 2 * weights / STAGES + 4 * grads / STAGES
    return f"16/d + {whole:g}"


def buffers_table() -> str:
    """Counts of buffers, what they amount to, and what they cost."""
    rows = (
        (STAGES, STAGES),
        (STAGES, 2),
        (2, 2),
        (1, 1),
        (3, 3),
        (STAGES, 1),
        (2, STAGES),
        (STAGES + 4, STAGES + 4),
    )
    return table(
        (
            "weight buffers",
            "gradient buffers",
            "is",
            "gathers, reduce-scatters in a step",
            "with 4 microbatches depth-first",
            "with 4 breadth-first",
            "bytes for each parameter",
        ),
        [_buffers_row(*row) for row in rows],
    )


NAMED = {
    (STAGES, STAGES): "ZeRO 1: the default",
    (STAGES, 2): "ZeRO 2",
    (2, 2): "ZeRO 3",
    (1, 1): "ZeRO 3 without overlap",
    (3, 3): "ZeRO 3, two stages ahead",
    (STAGES, 1): "ZeRO 2 without overlap",
    (2, STAGES): "weights sharded, gradients whole: no level has this",
    (STAGES + 4, STAGES + 4): "ZeRO 1: those beyond the stages stay empty",
}


def _buffers_row(weights: int, grads: int) -> tuple[str, ...]:
    runs = (
        counts(weights, grads),
        counts(weights, grads, depth=4),
        counts(weights, grads, breadth=4),
    )
    shown = (f"{run.gathers}, {run.scatters}" for run in runs)
    size = bytes_of(min(weights, STAGES), min(grads, STAGES))
    return (_whole(weights), _whole(grads), NAMED[weights, grads], *shown, size)


def _whole(count: int) -> str:
    return f"{count} (all)" if count == STAGES else str(count)


# What is taken and what is refused

CASES: tuple[Mapping[str, Any], ...] = (
    {},
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 4},
    {"num_grad_buffers": 1},
    {"num_grad_buffers": 3},
    {"num_weight_buffers": 2},
    {"num_grad_buffers": 0},
    {"zero_stage": 1, "num_grad_buffers": 1},
    {"zero_stage": 2, "num_grad_buffers": 2},
    {"zero_stage": 2, "num_grad_buffers": None},
    {"zero_stage": 2, "num_weight_buffers": 2},
    {"zero_stage": 3, "num_grad_buffers": 3, "num_weight_buffers": 2},
    {"layers_per_stage": 0.5},
    {"layers_per_stage": 0},
    {"stages_per_pipeline_stage": 2},
    {"store_frozen_weights_in_optimization_precision": False},
    {"compile_all": True},
)


def settings_table() -> str:
    """What each release makes of settings in `model.multi_stage`; releases that agree on all share a column."""
    dialect = compat.load("fast_llm")
    columns = {version: [_outcome(case, version) for case in CASES] for version in dialect.versions}
    runs = [list(run) for _, run in groupby(dialect.versions, key=lambda version: columns[version])]
    rows = [
        (_case(case), *(columns[run[0]][row] for run in runs)) for row, case in enumerate(CASES)
    ]
    return table(("settings", *map(_span, runs)), rows)


def _span(run: Sequence[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"


def _case(case: Mapping[str, Any]) -> str:
    words = (
        f"{name}: {'null' if value is None else str(value).lower()}" for name, value in case.items()
    )
    return code(", ".join(words)) if case else "none of them"


def _outcome(case: Mapping[str, Any], version: str) -> str:
    dialect = compat.load("fast_llm")
    try:
        config = dialect.read({"model": {"multi_stage": dict(case)}}, version)
    except BridgeError:
        known = all(
            dialect.knows(STAGED + name, value, version, dialect.default_entry)
            for name, value in case.items()
        )
        return "refused" if known else "no such field"
    found = (
        config.effective.get(STAGED + name) for name in ("num_weight_buffers", "num_grad_buffers")
    )
    return "weights {}, gradients {}".format(
        *("whole" if count is None else _buffers(count) for count in found)
    )


STAGED = "model.multi_stage."


def _buffers(count: int) -> str:
    return f"{count} buffer{'s' * (count > 1)}"


# How layers are cut


def cut(blocks: int, size: float) -> tuple[int, ...]:
    """Layers of each stage for an embedding, `blocks` blocks and a head (multi_stage.py: _split_into_stages)."""
    weights = (1000.0, *([1.0] * (blocks + 1)))
    stages, last, total, inside = list[int](), 0.0, 0.0, 0
    for place, weight in enumerate(weights):
        total, inside = total + weight, inside + 1
        if total >= last + size or place == len(weights) - 1:
            stages.append(inside)
            last, inside = total, 0
    return tuple(stages)


def layers_table() -> str:
    """Stages that a size makes."""
    found: dict[tuple[int, ...], list[float]] = {}
    for size in (0.5, 1, 1.5, 2, 2.5, 3, 4, 9, 2000):
        found.setdefault(cut(8, size), []).append(size)
    rows = [
        (", ".join(f"{size:g}" for size in sizes), str(len(made)), ", ".join(map(str, made)))
        for made, sizes in found.items()
    ]
    return table(("layers_per_stage", "stages", "layers in each"), rows)


# The plot

WIDE, HIGH, LEFT, TOP, APART = 300, 180, 60, 40, 90
COLOURS = ("#1b7f5c", "#c8553d")


def plot() -> str:
    """Traffic and memory by number of buffers, as SVG: one panel each."""
    places = range(1, STAGES + 1)
    deep = [counts(n, n, depth=4) for n in places]
    traffic = _panel(
        0,
        "collectives in a step",
        {"gathers": [c.gathers for c in deep], "reduce-scatters": [c.scatters for c in deep]},
    )
    sizes = {
        "weights": [2 * n / STAGES for n in places],
        "gradients": [4 * n / STAGES for n in places],
    }
    memory = _panel(WIDE + APART, "bytes in buffers for each parameter", sizes)
    size = f'width="{2 * WIDE + APART + LEFT + 30}" height="{HIGH + TOP + 70}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    return "\n".join(
        (head, '<rect width="100%" height="100%" fill="white"/>', traffic, memory, "</svg>\n")
    )


def _panel(shift: int, title: str, lines: Mapping[str, Sequence[float]]) -> str:
    top = 4 * ceil(max(max(values) for values in lines.values()) / 4)
    parts = [
        _text(shift + LEFT + WIDE / 2, 20, title),
        _text(shift + LEFT + WIDE / 2, TOP + HIGH + 36, "buffers of each kind"),
    ]
    parts += [_axis(shift, top)]
    for place, (name, values) in enumerate(lines.items()):
        parts.append(_line(shift, values, top, COLOURS[place]))
        parts.append(_text(shift + LEFT + 60 + 140 * place, TOP + HIGH + 58, name, COLOURS[place]))
    return "\n".join(parts)


def _at(shift: int, place: int, value: float, top: float) -> tuple[float, float]:
    return shift + LEFT + WIDE * place / (STAGES - 1), TOP + HIGH * (1 - value / top)


def _line(shift: int, values: Sequence[float], top: float, colour: str) -> str:
    points = [_at(shift, place, value, top) for place, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _axis(shift: int, top: float) -> str:
    x, base = shift + LEFT, TOP + HIGH
    frame = f'<path d="M{x} {TOP}V{base}H{x + WIDE}" fill="none" stroke="#444"/>'
    ticks = "".join(
        _text(_at(shift, place, 0, top)[0], base + 16, str(place + 1)) for place in range(STAGES)
    )
    marks = "".join(
        _text(x - 20, _at(shift, 0, top * part, top)[1] + 4, f"{top * part:g}")
        for part in (0, 0.5, 1)
    )
    return frame + ticks + marks


def _text(x: float, y: float, words: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="{colour}">{words}</text>'


def pages() -> dict[str, str]:
    """The plot."""
    return {"buffers.svg": plot()}


TABLES: Mapping[str, Callable[[], str]] = {
    "buffers": buffers_table,
    "settings": settings_table,
    "layers": layers_table,
}
