"""Tables: schedules as CSV, in the compute-only format of torch.distributed.pipelining (`_load_csv`, `_dump_csv`)."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from bridge import limits
from bridge.errors import ConfigError, few
from bridge.files.shown import show_value
from bridge.layout.schedule.action import COMPUTE, Action, ActionKind, Schedule
from bridge.layout.schedule.check import prove_schedule
from bridge.layout.schedule.generate import check_size

CELL = re.compile(r"([0-9]{1,9})([FBIWR])([0-9]{1,9})")
"""Pattern of a cell with an action: the stage, the letter of the kind, and the microbatch."""
FAR = re.compile(r"\s*([0-9]+)[A-Z]([0-9]+)\s*")
"""Pattern of a cell whose numbers may have any length. It finds numbers that are too high for any
schedule.
"""
LETTERS = tuple(sorted(COMPUTE))


def schedule_to_csv(schedule: Schedule) -> str:
    """Return `schedule` as CSV: a row for each rank, and in the row a cell such as `0F0` for each
    action. Actions that recompute are left out, because torch has no such action.
    """
    text = io.StringIO()
    rows = (
        [str(action) for action in row if action.kind is not ActionKind.AGAIN]
        for row in schedule.rows
    )
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def is_table(text: str) -> bool:
    """Return whether `text` may come from `schedule_to_csv`: each cell has an action, or is empty."""
    cells = (cell for line in text.splitlines() for cell in line.split(","))
    return all(not cell or CELL.fullmatch(cell) for cell in cells)


def read_schedule(text: str, where: str = "schedule.csv") -> Schedule:
    """Return the schedule that the CSV `text` describes. In an empty cell the rank is idle. Raises
    `ConfigError` with all problems of the text.
    """
    rows = csv_cells(text, where)
    problems: list[str] = []
    actions = tuple(
        tuple(_cell_actions(row, f"{where}: row {rank + 1}", problems))
        for rank, row in enumerate(rows)
    )
    homes = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    missing = [str(stage) for stage in range(max(homes, default=-1) + 1) if stage not in homes]
    if missing:
        problems.append(
            f"{where}: no rank runs stage {', '.join(missing)}; number stages from 0 without gaps"
        )
    ConfigError.raise_if(few(problems, "cells that are not actions"))
    schedule = Schedule("csv", tuple(homes[stage] for stage in sorted(homes)), actions)
    check_size(schedule.stages, schedule.microbatches)
    ConfigError.raise_if(f"{where}: {problem}" for problem in prove_schedule(schedule))
    return schedule


def csv_cells(text: str, where: str) -> list[list[str]]:
    """Return the cells of each row that is not empty. Raises `ConfigError` if the text is too long
    or no table, or if a cell has a number that is too high.
    """
    if len(text) > limits.TEXT:
        raise ConfigError(
            f"{where}: found more than {limits.TEXT >> 10} KiB, expected a short schedule; is this the right file?"
        )
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise ConfigError(
            f"{where}: not a table ({error}); write one row for each rank, with commas between "
            "cells"
        ) from None
    number = sum(map(len, rows))
    if number > limits.ACTIONS:
        raise ConfigError(
            f"{where}: found {number:,} cells, expected at most {limits.ACTIONS:,}; use fewer"
        )
    # Without gaps, no number can reach the number of cells. Such a cell is refused before anything
    # of that size is built, and more than nine digits are too many without being converted.
    for cell in (cell for row in rows for cell in row):
        match = FAR.fullmatch(cell)
        if match and any(len(digits) > 9 or int(digits) >= number for digits in match.groups()):
            problem = (
                f"found the cell {show_value(cell.strip(), 16)} in a table of {number:,} cells"
            )
            raise ConfigError(
                f"{where}: {problem}; number stages and microbatches from 0 without gaps"
            )
    return rows


def _cell_actions(cells: list[str], where: str, problems: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(cells):
        match = CELL.fullmatch(cell.strip())
        if match:
            yield Action(int(match[1]), ActionKind(match[2]), int(match[3]))
        elif cell.strip():
            problems.append(
                f"{where}, column {column + 1}: found {show_value(cell.strip(), 16)}, expected a cell such as 0F0:"
                f" a stage, one of the letters {', '.join(LETTERS)}, and a microbatch"
            )
