"""Tables: schedules as CSV, in the compute-only format of torch.distributed.pipelining (`_load_csv`, `_dump_csv`)."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from bridge.errors import ConfigError
from bridge.layout.schedule.action import COMPUTE, Action, Kind, Schedule
from bridge.layout.schedule.check import prove

CELL = re.compile(r"(\d+)([FBIWR])(\d+)")
LETTERS = tuple(sorted(COMPUTE))


def written(schedule: Schedule) -> str:
    """A row for each rank, a cell such as `0F0` for each action. Torch knows no recomputation, so that is left out."""
    text = io.StringIO()
    rows = ([str(action) for action in row if action.kind is not Kind.AGAIN] for row in schedule.rows)
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read(text: str, where: str = "schedule.csv") -> Schedule:
    """The schedule that `text` describes; empty cells are idle. Raises `ConfigError` with every problem."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    problems: list[str] = []
    found = tuple(tuple(_actions(row, f"{where}: row {rank + 1}", problems)) for rank, row in enumerate(rows))
    homes = {action.stage: rank for rank, row in enumerate(found) for action in row}
    missing = [str(stage) for stage in range(max(homes, default=-1) + 1) if stage not in homes]
    if missing:
        problems.append(f"{where}: no rank runs stage {', '.join(missing)}; number stages from 0 without gaps")
    ConfigError.raise_if(problems)
    schedule = Schedule("csv", tuple(homes[stage] for stage in sorted(homes)), found)
    ConfigError.raise_if(f"{where}: {problem}" for problem in prove(schedule))
    return schedule


def _actions(cells: list[str], where: str, problems: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(cells):
        match = CELL.fullmatch(cell.strip())
        if match:
            yield Action(int(match[1]), Kind(match[2]), int(match[3]))
        elif cell.strip():
            problems.append(
                f"{where}, column {column + 1}: found {cell.strip()!r}, expected a stage, one of {', '.join(LETTERS)}, and a"
                " microbatch, such as 0F0"
            )
