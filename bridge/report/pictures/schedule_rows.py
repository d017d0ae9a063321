"""Rows of a schedule as text and as a picture show them: letters, colours, the parts that repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bridge.layout.schedule import Timeline
from bridge.layout.schedule.timeline import in_flight

COLOURS = {"F": "#4c72b0", "B": "#55a868", "I": "#64b5cd", "W": "#c7a252", "R": "#b07aa1"}
"""Colours of actions by letter: forward, backward, input gradient, weight gradient, recomputation."""

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
}


def title_line(timeline: Timeline) -> str:
    """Return name, size, bubble and peak of the schedule in one line."""
    it, peaks = timeline.schedule, [in_flight(row) for row in timeline.schedule.rows]
    return (
        f"{it.name}: {count_text(it.ranks, 'rank')}, {count_text(it.stages, 'stage')},"
        f" {count_text(it.microbatches, 'microbatch', 'es')};"
        f" bubble {timeline.bubble:.1%} of the time, at most {count_text(max(peaks), 'activation')} in flight"
    )


def repeat_text(part: RepeatedPart) -> str:
    """Say how often a part of the schedule is run."""
    microbatches = "microbatch" if part.further == 1 else f"{part.further} microbatches"
    return f"{part.times} times, each time with the next {microbatches}"


def count_text(count: int, word: str, plural: str = "s") -> str:
    """Return a count with its noun in singular or plural, such as `2 ranks`."""
    return f"{count} {word}{plural if count != 1 else ''}"


@dataclass(frozen=True, slots=True)
class RepeatedPart:
    """A part of a schedule from unit `start` to unit `stop`, which is repeated `times` times.

    The microbatch indices of a repetition are `further` higher than those of the repetition before.
    """

    start: int
    stop: int
    times: int = 1
    further: int = 0


Column = tuple[tuple[int, str, int, bool] | None, ...]
"""The actions of all ranks in one unit of time.

Each is None if the rank is idle, else stage, letter, microbatch, and whether the action began in an
earlier unit.
"""


LONGEST = 600
"""Length in units of time up to which parts of a schedule are searched for repetitions."""


OFTEN = 3
"""Number of repetitions from which on a part is shown once, with its count."""


def find_repeats(timeline: Timeline) -> list[RepeatedPart]:
    """Divide a schedule into parts: parts that are repeated, with their count, and the parts between these."""
    columns, parts, place, plain = _schedule_columns(timeline), list[RepeatedPart](), 0, 0
    while place < len(columns):
        # The part that covers most time: a short one within a longer one would be shown many times.
        part = max(
            _repeats_from(columns, place),
            key=lambda part: part.times * (part.stop - part.start),
            default=None,
        )
        if part is None:
            place += 1
            continue
        if plain < place:
            parts.append(RepeatedPart(plain, place))
        parts.append(part)
        place = plain = place + part.times * (part.stop - part.start)
    if plain < place:
        parts.append(RepeatedPart(plain, place))
    return parts


def _repeats_from(columns: list[Column], start: int) -> Iterator[RepeatedPart]:
    """Yield parts that begin at `start` and are repeated at least `OFTEN` times, shortest first."""
    for period in range(1, min(LONGEST, (len(columns) - start) // OFTEN) + 1):
        further = _microbatch_offset(columns[start], columns[start + period])
        if not further:
            continue
        length = period
        while (
            start + length < len(columns)
            and _microbatch_offset(columns[start + length - period], columns[start + length])
            == further
        ):
            length += 1
        if length // period >= OFTEN:
            yield RepeatedPart(start, start + period, length // period, further)
            if 2 * length > len(columns) - start:
                return  # it covers more than half of the rest: a longer period cannot cover much more


def _microbatch_offset(before: Column, after: Column) -> int:
    """Return by how much the microbatch indices of `after` exceed those of `before`; 0 if the two
    parts differ in anything else.
    """
    steps = set[int]()
    for one, other in zip(before, after, strict=True):
        if (one is None) != (other is None):
            return 0
        if one is not None and other is not None:
            if (one[0], one[1], one[3]) != (other[0], other[1], other[3]):
                return 0
            steps.add(other[2] - one[2])
    return max(0, steps.pop()) if len(steps) == 1 else 0


def _schedule_columns(timeline: Timeline) -> list[Column]:
    rows: list[list[tuple[int, str, int, bool] | None]] = [
        [None] * round(timeline.length) for _ in timeline.rows
    ]
    for rank, row in enumerate(timeline.rows):
        for action, start, end in (
            (span.action, round(span.start), round(span.end)) for span in row
        ):
            for place in range(start, end):
                rows[rank][place] = (
                    action.stage,
                    str(action.kind),
                    action.microbatch,
                    place > start,
                )
    return list(zip(*rows, strict=True))


def action_letters(timeline: Timeline) -> set[str]:
    """The kinds of actions in a schedule."""
    return {action.kind for row in timeline.schedule.rows for action in row}


def has_several_stages(timeline: Timeline) -> bool:
    """Whether a rank has more than one stage."""
    return timeline.schedule.stages > timeline.schedule.ranks
