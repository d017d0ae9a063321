"""What `schedule` does: show the pipeline schedule of a config, prove it, and draw it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.batch import solve
from bridge.cli.convert import Job, answered, console, print_json, read
from bridge.errors import BridgeError, ConfigError
from bridge.files import write_all
from bridge.layout.partition import Layers, partition
from bridge.layout.pipeline import name_of, ranks_of, schedule_of, text_of
from bridge.layout.schedule import Costs, Kind, Schedule, Timeline, prove, timeline
from bridge.layout.schedule.table import written
from bridge.layout.schedule.timeline import in_flight
from bridge.plan import Plan
from bridge.translation import lift

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.text import Text

COLOURS = {"F": "#4c72b0", "B": "#55a868", "I": "#8fc99f", "W": "#c7a252", "R": "#b07aa1"}
"""Forward, backward, its halves (input, weight), recomputation."""
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recompute"}
CELLS = 100
"""Units of time in a block of text where the width is not the terminal's."""


@dataclass(frozen=True)
class Options:
    """Microbatches where the config leaves them open, the picture to write, the CSV to write."""

    microbatches: int | None = None
    png: Path | None = None
    csv: Path | None = None


def schedule(job: Job, options: Options) -> int:
    """Show the schedule; the exit code."""

    def work() -> int:
        plan = lift(read(job))
        found = _timeline(plan, options.microbatches)
        if options.csv:
            write_all({options.csv: written(found.schedule)})
        if options.png:
            draw(found, options.png)
        print_json(as_json(found)) if job.json else _print(found)
        for path in (options.csv, options.png):
            if path and not job.json:
                print(f"wrote {path}")
        return 0

    return answered(job, work)


def _timeline(plan: Plan, microbatches: int | None) -> Timeline:
    found = schedule_of(plan, _microbatches(plan, microbatches), _stages(plan), text_of(plan))
    ConfigError.raise_if(f"schedule: {problem}" for problem in prove(found))
    return timeline(found, Costs(again=float(_recomputes(plan, found))))


def _microbatches(plan: Plan, given: int | None) -> int:
    batch = plan.batch
    number = given or solve(batch.micro, batch.accumulation, batch.global_, plan.parallel.data).accumulation
    if number is None:
        raise ConfigError("batch.accumulation: the file leaves open how many microbatches a step has; say --microbatches N")
    return number


def _stages(plan: Plan) -> int | None:
    """How many stages the plan cuts, where that does not follow from ranks and virtual stages alone."""
    if plan.stages.layers_per_stage is None or plan.model.layers is None or plan.schedule.virtual or ranks_of(plan) == 1:
        return None
    if name_of(plan) == "csv":
        return None
    return len(partition(plan.stages, Layers(plan.model.layers + 2, 1, 1)))


def _recomputes(plan: Plan, found: Schedule) -> bool:
    ahead = any(action.kind is Kind.AGAIN for row in found.rows for action in row)
    return ahead or plan.recompute.granularity == "full"


def as_json(found: Timeline) -> dict[str, Any]:
    """As plain values; see docs/json.md."""
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
        "exit_code": 0,
    }


def title(found: Timeline) -> str:
    """Name, shape, bubble and peak in one line."""
    it, peaks = found.schedule, [in_flight(row) for row in found.schedule.rows]
    return (
        f"{it.name}: {_number(it.ranks, 'rank')}, {_number(it.stages, 'stage')}, {_number(it.microbatches, 'microbatch', 'es')};"
        f" bubble {found.bubble:.1%} of the time, at most {_number(max(peaks), 'activation')} in flight"
    )


def _number(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{plural if count != 1 else ''}"


def _print(found: Timeline) -> None:
    out = console(sys.stdout)
    out.print(title(found), markup=False)
    legend = ", ".join(f"{letter} {NAMES[letter]}" for letter in NAMES if letter in _letters(found))
    stage = "stage, " if _several(found) else ""
    out.print(f"cells: {stage}action ({legend}), microbatch; a dot is an idle unit of time\n", markup=False)
    _print_rows(found, out)
    for rank in range(found.schedule.ranks):
        out.print(_summary(found, rank), markup=False)


def _print_rows(found: Timeline, out: Console) -> None:
    """A row for each rank, in blocks as wide as the terminal."""
    cells = [_cells(found, rank) for rank in range(found.schedule.ranks)]
    width = max((len(text) for row in cells for text, _ in row), default=1) + 1
    label = len(f"rank {found.schedule.ranks - 1}  ")
    block = max(1, (out.width - label) // width) if sys.stdout.isatty() else CELLS
    for start in range(0, max(map(len, cells)), block):
        for rank, row in enumerate(cells):
            out.print(_line(f"rank {rank}".ljust(label), row[start : start + block], width), soft_wrap=True)
        out.print()


def _summary(found: Timeline, rank: int) -> str:
    stages = ", ".join(map(str, found.schedule.local(rank)))
    idle = 1 - sum(span.end - span.start for span in found.rows[rank]) / found.length
    return f"rank {rank}: stages {stages}; idle {idle:.1%}; {in_flight(found.schedule.rows[rank])} in flight"


def _letters(found: Timeline) -> set[str]:
    return {action.kind for row in found.schedule.rows for action in row}


def _several(found: Timeline) -> bool:
    return found.schedule.stages > found.schedule.ranks


def _cells(found: Timeline, rank: int) -> list[tuple[str, str]]:
    """What a rank does in each unit of time, with its letter; an action that goes on shows as dashes."""
    cells = [(".", "")] * round(found.length)
    for action, start, end in ((span.action, round(span.start), round(span.end)) for span in found.rows[rank]):
        stage = str(action.stage) if _several(found) else ""
        text = f"{stage}{action.kind}{action.microbatch}"
        for place in range(start, end):
            cells[place] = (text if place == start else "-" * len(text), str(action.kind))
    return cells


def _line(label: str, cells: list[tuple[str, str]], width: int) -> Text:
    from rich.text import Text

    line = Text(label)
    for text, letter in cells:
        line.append(text.ljust(width), COLOURS.get(letter))
    return line


def draw(found: Timeline, path: Path) -> None:
    """A picture with a row for each rank; white is idle. Raises `BridgeError` if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise BridgeError("--png: matplotlib is not installed; pip install 'stagebridge[plot]'")
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = found.schedule.ranks
    figure = Figure(figsize=(min(40.0, max(8.0, found.length * 0.25)), 1.6 + 0.55 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _bars(axes, found)
    axes.set_title(title(found), fontsize=10)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, found.length)
    axes.set_xlabel("time (one forward of a stage = 1)")
    _legend(figure, found)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_all({path: picture.getvalue()})


def _bars(axes: Axes, found: Timeline) -> None:
    several = _several(found)
    for rank, row in enumerate(found.rows):
        local = found.schedule.local(rank)
        for letter, spans in groupby(sorted(row, key=lambda span: span.action.kind), lambda span: span.action.kind):
            for span in spans:
                shade = 1.0 - 0.5 * local.index(span.action.stage) / len(local)
                length = span.end - span.start
                axes.barh(rank, length, 0.9, span.start, color=COLOURS[letter], alpha=shade, edgecolor="white", linewidth=0.6)
                label = f"{span.action.microbatch}"
                if several and length > 1:
                    label = f"{span.action.stage}·{label}"
                axes.text(span.start + length / 2, rank, label, ha="center", va="center", fontsize=6, color="black")


def _legend(figure: Figure, found: Timeline) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[letter], label=NAMES[letter]) for letter in NAMES if letter in _letters(found)]
    patches.append(Patch(facecolor="white", edgecolor="black", label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
