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
from bridge.cli.job import Job
from bridge.cli.pictures import refuse_other_file
from bridge.cli.read_job import answer_job, read_job
from bridge.cli.schedule_picture import draw_picture
from bridge.cli.schedule_rows import (
    COLOURS,
    NAMES,
    RepeatedPart,
    action_letters,
    find_repeats,
    has_several_stages,
    repeat_text,
    title_line,
)
from bridge.cli.terminal import console, print_json, say
from bridge.cli.write_outputs import not_over_input, refuse_other
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
            timeline, notes = time_schedule(lift(read_job(job)), options.microbatches)
        _refuse_other_files(job, options)
        if options.csv:
            write_all({options.csv: schedule_to_csv(timeline.schedule)})
        if options.png:
            draw_picture(timeline, options.png)
        print_json({**as_json(timeline), "notes": list(notes)}) if job.json else _print_schedule(
            timeline, notes
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
    pipeline_plan, notes = describe_pipeline(plan, count)
    orders = schedule_of(pipeline_plan, count, stages, text_of(plan), short=True)
    ConfigError.raise_if(f"schedule: {problem}" for problem in prove_schedule(orders))
    # A schedule that recomputes ahead has actions for it; else full recomputation makes each backward longer by a forward.
    ahead = any(action.kind is ActionKind.AGAIN for row in orders.rows for action in row)
    recomputes = ahead or plan.recompute.granularity == "full"
    return make_timeline(orders, Costs(again=float(recomputes))), notes


def _microbatch_count(plan: Plan, option: int | None) -> int:
    batch = plan.batch
    count = (
        option
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


def _print_schedule(timeline: Timeline, notes: tuple[str, ...] = ()) -> None:
    out = console(sys.stdout)
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
    block = max(1, (out.width - label) // width) if sys.stdout.isatty() else CELLS
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
