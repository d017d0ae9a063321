"""The `schedule` command: show the pipeline schedule of a config, prove it, and draw it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.budget import stay_within_limits
from bridge.cli.convert import answer_job, not_over_input, read_job
from bridge.cli.job import Job
from bridge.cli.pictures import refuse_other_file
from bridge.cli.terminal import console, print_json, say
from bridge.cli.write_outputs import refuse_other
from bridge.errors import ConfigError
from bridge.files import write_all
from bridge.layout.partition import Layers, partition_layers
from bridge.layout.pipeline import describe_pipeline, name_of, ranks_of, schedule_of, text_of
from bridge.layout.schedule import ActionKind, Costs, Timeline, make_timeline, prove_schedule
from bridge.layout.schedule.table import is_table, schedule_to_csv
from bridge.layout.schedule.timeline import in_flight
from bridge.plan.batch import solve
from bridge.plan.plan import Plan
from bridge.report import json_types
from bridge.report.exit_codes import Exit
from bridge.translation.lift import lift

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

COLOURS = {"F": "#4c72b0", "B": "#55a868", "I": "#64b5cd", "W": "#c7a252", "R": "#b07aa1"}
"""Colours of actions by letter: forward, backward, input gradient, weight gradient, recomputation."""
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
}
CELLS = 100
"""Units of time in a block of text if the output is no terminal."""


@dataclass(frozen=True)
class ScheduleOptions:
    """The number of microbatches for a config that does not set one, and the files for the picture and the CSV table."""

    microbatches: int | None = None
    png: Path | None = None
    csv: Path | None = None


def schedule(job: Job, options: ScheduleOptions) -> int:
    """Show the schedule. Returns the exit code."""

    def work() -> int:
        with stay_within_limits():
            found, notes = time_schedule(lift(read_job(job)), options.microbatches)
        _refuse_other_files(job, options)
        if options.csv:
            write_all({options.csv: schedule_to_csv(found.schedule)})
        if options.png:
            from bridge.cli.schedule_picture import draw_picture

            draw_picture(found, options.png)
        print_json({**as_json(found), "notes": list(notes)}) if job.json else _print_schedule(
            found, notes
        )
        for path in (options.csv, options.png):
            if path and not job.json:
                say(f"wrote {path}")
        return Exit.CLEAN

    with _pause_garbage_collection():
        return answer_job(job, work)


def _refuse_other_files(job: Job, options: ScheduleOptions) -> None:
    """Raise `SourceError` if an output is the file that is read, or a file of another kind."""
    not_over_input(job, [path for path in (options.csv, options.png) if path])
    if options.csv:
        refuse_other(
            options.csv,
            "a table of a schedule",
            lambda content: is_table(content.decode(errors="replace")),
        )
    if options.png:
        refuse_other_file(options.png)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Context without garbage collection: none of a schedule's many actions is garbage, and each
    collection would look through all of them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_schedule(plan: Plan, microbatches: int | None) -> tuple[Timeline, tuple[str, ...]]:
    """Return the schedule with start times, and notes.

    If the plan's own schedule cannot be shown, a note gives the reason and the schedule shown
    instead.
    """
    count, stages = _microbatch_count(plan, microbatches), _stage_count(plan)
    shown, notes = describe_pipeline(plan, count)
    found = schedule_of(shown, count, stages, text_of(plan), short=True)
    ConfigError.raise_if(f"schedule: {problem}" for problem in prove_schedule(found))
    # A schedule that recomputes ahead has actions for it; else full recomputation makes each backward longer by a forward.
    ahead = any(action.kind is ActionKind.AGAIN for row in found.rows for action in row)
    recomputes = ahead or plan.recompute.granularity == "full"
    return make_timeline(found, Costs(again=float(recomputes))), notes


def _microbatch_count(plan: Plan, given: int | None) -> int:
    batch = plan.batch
    count = (
        given
        or solve(batch.micro, batch.accumulation, batch.global_, plan.parallel.data).accumulation
    )
    if count is None:
        raise ConfigError(
            "batch.accumulation: the file does not set the number of microbatches in a step; give "
            "--microbatches N"
        )
    return count


def _stage_count(plan: Plan) -> int | None:
    """Number of stages that the plan cuts the model into; None if the number follows from
    ranks and virtual stages alone.
    """
    if (
        plan.stages.layers_per_stage is None
        or plan.model.layers is None
        or plan.schedule.virtual
        or ranks_of(plan) == 1
    ):
        return None
    if name_of(plan) == "csv":
        return None
    return len(partition_layers(plan.stages, Layers(plan.model.layers + 2, 1, 1)))


def as_json(found: Timeline) -> json_types.Scheduled:
    """Return the schedule as the JSON object that docs/json.md describes."""
    it = found.schedule
    return {
        "name": it.name,
        "ranks": it.ranks,
        "stages": it.stages,
        "microbatches": it.microbatches,
        "homes": list(it.homes),
        "rows": [[str(action) for action in row] for row in it.rows],
        "starts": [[span.start for span in row] for row in found.rows],
        "length": found.length,
        "bubble": found.bubble,
        "overhead": found.overhead,
        "in_flight": [in_flight(row) for row in it.rows],
        "kept": sorted(map(list, it.kept)),
        "exit_code": Exit.CLEAN,
    }


def title_line(found: Timeline) -> str:
    """Return name, size, bubble and peak of the schedule in one line."""
    it, peaks = found.schedule, [in_flight(row) for row in found.schedule.rows]
    return (
        f"{it.name}: {count_text(it.ranks, 'rank')}, {count_text(it.stages, 'stage')},"
        f" {count_text(it.microbatches, 'microbatch', 'es')};"
        f" bubble {found.bubble:.1%} of the time, at most {count_text(max(peaks), 'activation')} in flight"
    )


def repeat_text(part: RepeatedPart) -> str:
    """Say how often a part of the schedule is run."""
    microbatches = "microbatch" if part.further == 1 else f"{part.further} microbatches"
    return f"{part.times} times, each time with the next {microbatches}"


def count_text(count: int, word: str, plural: str = "s") -> str:
    """Return a count with its noun in singular or plural, such as `2 ranks`."""
    return f"{count} {word}{plural if count != 1 else ''}"


def _print_schedule(found: Timeline, notes: tuple[str, ...] = ()) -> None:
    out = console(sys.stdout)
    out.print(title_line(found), markup=False)
    for note in notes:
        out.print(f"note: {note}", markup=False)
    legend = ", ".join(
        f"{letter} {NAMES[letter]}" for letter in NAMES if letter in action_letters(found)
    )
    stage = "stage, " if has_several_stages(found) else ""
    out.print(
        f"cells: {stage}action ({legend}), microbatch; a dot is an idle unit of time\n",
        markup=False,
    )
    _print_rows(found, out)
    for rank in range(found.schedule.ranks):
        stages = ", ".join(map(str, found.schedule.local(rank)))
        idle = 1 - sum(span.end - span.start for span in found.rows[rank]) / found.length
        peak = in_flight(found.schedule.rows[rank])
        out.print(f"rank {rank}: stages {stages}; idle {idle:.1%}; {peak} in flight", markup=False)


def _print_rows(found: Timeline, out: Console) -> None:
    """Print a row for each rank, in blocks as wide as the terminal. If one block is not enough,
    repeated parts are shown once.
    """
    cells = [_rank_cells(found, rank) for rank in range(found.schedule.ranks)]
    width = max((len(text) for row in cells for text, _ in row), default=1) + 1
    label = len(f"rank {found.schedule.ranks - 1}  ")
    block = max(1, (out.width - label) // width) if sys.stdout.isatty() else CELLS
    length = max(map(len, cells))
    parts = find_repeats(found) if length > block else [RepeatedPart(0, length)]
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


def find_repeats(found: Timeline) -> list[RepeatedPart]:
    """Divide a schedule into parts: parts that are repeated, with their count, and the parts between these."""
    columns, parts, place, plain = _schedule_columns(found), list[RepeatedPart](), 0, 0
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


def _schedule_columns(found: Timeline) -> list[Column]:
    rows: list[list[tuple[int, str, int, bool] | None]] = [
        [None] * round(found.length) for _ in found.rows
    ]
    for rank, row in enumerate(found.rows):
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


def action_letters(found: Timeline) -> set[str]:
    """The kinds of actions in a schedule."""
    return {action.kind for row in found.schedule.rows for action in row}


def has_several_stages(found: Timeline) -> bool:
    """Whether a rank has more than one stage."""
    return found.schedule.stages > found.schedule.ranks


def _rank_cells(found: Timeline, rank: int) -> list[tuple[str, str]]:
    """Return text and action letter for each unit of time of a rank.

    Dashes stand for an action that continues.
    """
    cells, apart = [(".", "")] * round(found.length), has_several_stages(found)
    for action, start, end in (
        (span.action, round(span.start), round(span.end)) for span in found.rows[rank]
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
