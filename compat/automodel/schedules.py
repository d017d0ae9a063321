"""Schedules of torch.distributed.pipelining by name, and CSV files that list only the computations
of a schedule.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bridge.errors import ConfigError, few, nearest
from bridge.files.shown import show_value
from bridge.layout.schedule import check_size
from bridge.layout.schedule.table import csv_cells


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule class of torch. `ours` is the plan's name for the schedule.

    A `single` schedule runs one stage on each rank, all others run several. A `split` schedule
    splits the backward pass, a `pair` schedule needs two stages on each rank, a `rounds` schedule
    needs rounds with equal numbers of micro batches, and an `abstract` schedule only runs a CSV
    file. For a `v` schedule AutoModel places the stages in a V: the first rank has the first and
    the last stage. AutoModel does so for only one of torch's two V schedules.
    """

    name: str
    ours: str | None = None
    single: bool = False
    split: bool = False
    pair: bool = False
    rounds: bool = False
    abstract: bool = False
    v: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name.lower(): schedule
    for schedule in (
        Schedule("1F1B", "1f1b", single=True),
        Schedule("Interleaved1F1B", "interleaved_1f1b", rounds=True),
        Schedule("GPipe", "gpipe", single=True),
        Schedule("LoopedBFS", "looped_bfs"),
        Schedule("InterleavedZeroBubble", "zero_bubble", split=True, rounds=True),
        Schedule("ZBVZeroBubble", "zero_bubble_v", split=True, pair=True, v=True),
        Schedule("DualPipeV", "zero_bubble_v", split=True, pair=True),
        Schedule("PipelineScheduleSingle", None, single=True, abstract=True),
        Schedule("PipelineScheduleMulti", None, abstract=True),
    )
}
"""Schedules that torch accepts, in upper or lower case (torch.distributed.pipelining.schedules, get_schedule_class)."""

MISNAMED: Mapping[str, str] = {
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zero_bubble": "InterleavedZeroBubble",
    "v_schedule": "ZBVZeroBubble",
    "dfs": "Interleaved1F1B",
}
"""Names of schedules that AutoModel's documentation lists but torch refuses. Each has the name that
torch accepts.
"""


def schedule(name: str, where: str = "pp_schedule") -> Schedule:
    """Return the schedule `name`, in upper or lower case. Raises `ConfigError` if torch refuses the
    name.
    """
    kind = SCHEDULES.get(name.lower())
    if kind is None:
        raise ConfigError(
            f"{where}: found {name!r}, which torch refuses; {_advice_on(name.lower())}"
        )
    return kind


def _advice_on(name: str) -> str:
    if name in MISNAMED:
        return f"AutoModel's documentation lists this name, but torch's name is {MISNAMED[name]}"
    names = [kind.name for kind in SCHEDULES.values() if not kind.abstract]
    return f"use one of {', '.join(names)}{nearest(name, SCHEDULES)}"


CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
BEFORE = {"B": "F", "I": "F", "W": "I"}
"""For each action: the action that must come earlier for the same stage and micro batch."""


@dataclass(frozen=True)
class Table:
    """The computations of a schedule. For each rank, in order: (stage, action, micro batch), or
    None for an idle step.

    The actions are F (forward pass), B (whole backward pass), I (gradients of inputs) and W
    (gradients of weights). I and W together are a split backward pass.
    """

    ranks: tuple[tuple[tuple[int, str, int] | None, ...], ...]

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return self._count(0)

    @property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return self._count(2)

    def _count(self, part: Literal[0, 2]) -> int:
        return 1 + max((cell[part] for row in self.ranks for cell in row if cell), default=-1)


def table(text: str, name: str = "schedule") -> Table:
    """Read a schedule from CSV. Each row is a rank and each cell an action such as `0F0`. An empty
    cell is an idle step.

    Checks that each stage is on one rank, and that each rank runs every micro batch of its stages
    once forward and once backward (B, or I and W) in a possible order. Raises `ConfigError` with
    every problem.
    """
    rows = csv_cells(text, name)
    problems: list[str] = (
        [f"{name}: empty; expected a row for each pipeline rank"] if not rows else []
    )
    ranks = tuple(
        tuple(
            _read_cell(cell, f"{name}: row {rank + 1}, column {step + 1}", problems)
            for step, cell in enumerate(row)
        )
        for rank, row in enumerate(rows)
    )
    ConfigError.raise_if(few(problems, "cells that are not actions"))
    result = Table(ranks)
    check_size(result.stages, result.microbatches)
    ConfigError.raise_if(f"{name}: {problem}" for problem in _find_flaws(result))
    return result


def _read_cell(text: str, where: str, problems: list[str]) -> tuple[int, str, int] | None:
    match = CELL.fullmatch(text.strip())
    if match:
        return int(match[1]), match[2], int(match[3])
    if text.strip():
        problems.append(
            f"{where}: found {show_value(text.strip(), 16)}, expected a stage, one of F, I, W, B, and a microbatch, such as 0F0"
        )
    return None


def _find_flaws(schedule_table: Table) -> Iterator[str]:
    """Yield an error for each reason why torch cannot run a table: a stage on several ranks, a gap
    in the numbers of stages, or an action whose input does not exist yet.
    """
    homes: dict[int, int] = {}
    for rank, row in enumerate(schedule_table.ranks):
        for stage in sorted({cell[0] for cell in row if cell}):
            if homes.setdefault(stage, rank) != rank:
                yield f"stage {stage} is on ranks {homes[stage]} and {rank}; keep each stage on one rank"
    missing = [str(stage) for stage in range(schedule_table.stages) if stage not in homes]
    if missing:
        yield f"no rank runs stage {', '.join(missing)}; number stages from 0 without gaps"
    microbatches = schedule_table.microbatches
    for row in schedule_table.ranks:
        yield from _row_flaws(row, microbatches)


def _row_flaws(row: Sequence[tuple[int, str, int] | None], microbatches: int) -> Iterator[str]:
    cells = Counter(cell for cell in row if cell)
    for stage in sorted({cell[0] for cell in row if cell}):
        for microbatch in range(microbatches):
            forward, *backward = (cells[stage, action, microbatch] for action in "FBIW")
            # Counts of B, I and W: one whole backward pass, or both of its parts.
            if forward != 1 or backward not in ([1, 0, 0], [0, 1, 1]):
                yield (
                    f"stage {stage}: microbatch {microbatch} needs one F, and either one B or one I"
                    " and one W"
                )
    earlier: set[tuple[int, str, int]] = set()
    for cell in row:
        if cell:
            stage, action, microbatch = cell
            need = BEFORE.get(action)
            # An action that is missing altogether was told above.
            if (
                need
                and (stage, need, microbatch) in cells
                and (stage, need, microbatch) not in earlier
            ):
                yield f"stage {stage}: {action} of microbatch {microbatch} comes before its {need}"
            earlier.add(cell)
