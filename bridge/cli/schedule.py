"""The `schedule` command: show the pipeline schedule of a config, prove it, and draw it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.api.access import limit_access
from bridge.api.read import read_config
from bridge.cli.budget import stay_within_limits
from bridge.cli.job import Job, answer
from bridge.cli.terminal import print_json, say
from bridge.files import write_all
from bridge.layout.pipeline import time_schedule
from bridge.layout.schedule.table import is_table, schedule_to_csv
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.pictures.page import refuse_other_file
from bridge.report.pictures.schedule import draw_picture
from bridge.report.schedules import as_json, print_schedule
from bridge.translation.lift import lift
from bridge.translation.write_outputs import not_over_input, refuse_other

if TYPE_CHECKING:
    pass


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
            timeline, notes = time_schedule(lift(read_config(job)), options.microbatches)
        _refuse_other_files(job, options)
        if options.csv:
            write_all({options.csv: schedule_to_csv(timeline.schedule)})
        if options.png:
            draw_picture(timeline, options.png)
        if job.json:
            print_json({**as_json(timeline), "notes": list(notes)})
        else:
            print_schedule(timeline, console(sys.stdout), notes)
        for path in (options.csv, options.png):
            if path and not job.json:
                say(f"wrote {path}")
        return Exit.CLEAN

    with _pause_garbage_collection(), answer(job), limit_access(job):
        return work()


def _refuse_other_files(job: Job, options: ScheduleOptions) -> None:
    """Raise `SourceError` if an output is the file that is read, or a file of another kind."""
    not_over_input(job.file, [path for path in (options.csv, options.png) if path])
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
