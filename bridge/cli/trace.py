"""What `trace` does: compare two traced runs, or show what is in one."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.clean import clean
from bridge.cli.terminal import console, print_json, say
from bridge.errors import BridgeError, nearest
from bridge.exits import Exit
from bridge.files import write_all, write_text
from bridge.grid import Grid

if TYPE_CHECKING:
    from rich.console import Console

    from bridge.trace.comparison import Comparison, Line
    from bridge.trace.run import Entry, Run
    from bridge.trace.summary import Summary

MEASURED = ("equal", "rounding")
"""Verdicts on tensors whose values were held against each other."""
STATISTICS = ("mean", "std", "low", "high", "norm", "nans", "infs")
"""What a line shows of a tensor, and what can be plotted."""
SHOWN = 8
"""Differences after the first, and samples of a tensor, that are printed."""


@dataclass(frozen=True)
class Selection:
    """What of a run is shown: layers by a part of their name, kinds, steps (all where empty), microbatches apart or not."""

    layers: Sequence[str] = ()
    kinds: Sequence[str] = ()
    steps: Sequence[int] = ()
    microbatches: bool = False


def diff(first: Path, second: Path, html: Path | None, as_json: bool) -> int:
    """Compare two runs; the exit code."""

    def work() -> int:
        from bridge.trace.comparison import compare
        from bridge.trace.heat_map import page

        found = compare(_run(first), _run(second))
        code = _exit(found)
        if html:
            write_text(html, page(found))
        print_json({**_comparison(found), "exit_code": code}) if as_json else _tell(found, html)
        return code

    return _answered(as_json, work)


def show(folder: Path, selection: Selection, plot: Path | None, statistic: str, as_json: bool) -> int:
    """Show the tensors of a run."""

    def work() -> int:
        if statistic not in STATISTICS:
            raise BridgeError(f"--statistic: found {statistic}, expected {', '.join(STATISTICS)}{nearest(statistic, STATISTICS)}")
        run = _run(folder)
        entries = tuple(_selected(run, selection))
        if not entries:
            raise BridgeError(f"{folder}: nothing in it passes these filters; {_told(run)}")
        if plot:
            draw(entries, statistic, plot)
        if as_json:
            tensors = [_fields(entry, selection.microbatches) for entry in entries]
            print_json({**_head(run), "tensors": tensors, "exit_code": Exit.CLEAN})
        elif plot:
            say(f"wrote {plot}")
        else:
            _list(run, entries, selection.microbatches)
        return Exit.CLEAN

    return _answered(as_json, work)


def _answered(as_json: bool, work: Callable[[], int]) -> int:
    """Run `work`; with --json an error is an object on stdout as well."""
    try:
        if find_spec("torch") is None:
            raise BridgeError("trace: torch is not installed; pip install 'stagebridge[engine]'")
        return work()
    except BridgeError as error:
        if as_json:
            print_json({"problems": list(error.problems), "exit_code": Exit.ERROR})
        raise


def _exit(found: Comparison) -> Exit:
    """Findings where they part; nothing is proved where no tensor that both have was logged with values."""
    if found.divergence:
        return Exit.FINDINGS
    return Exit.CLEAN if any(line.verdict in MEASURED for line in found.lines) else Exit.UNPROVED


def _run(folder: Path) -> Run:
    from bridge.trace.run import Run

    return Run.read(folder)


def _told(run: Run) -> str:
    steps = f"steps {run.steps[0]} to {run.steps[-1]}" if run.steps else "no whole step"
    kinds = sorted({entry.name.kind for entry in run.entries(run.steps[-1])}) if run.steps else ()
    return f"it has {steps}, layers {', '.join(run.about.get('layers', ()))}, and in the last step: {', '.join(kinds)}"


# Comparing


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "first": _head(found.first),
        "second": _head(found.second),
        "verdicts": dict(Counter(line.verdict for line in found.lines)),
        "divergence": _line(found.divergence) if found.divergence else None,
        "faults": [_line(line) for line in found.faults],
        "worst": _line(found.worst) if found.worst else None,
        "heat": {layer: {str(step): _number(share) for step, share in row.items()} for layer, row in found.heat().items()},
    }


def _head(run: Run) -> dict[str, Any]:
    return {"folder": str(run.folder), **{key: run.about.get(key) for key in ("engine", "mesh", "accumulation", "formats")}}


def _line(line: Line) -> dict[str, Any]:
    numbers = {"distance": _number(line.distance), "bound": _number(line.bound)}
    return {"name": str(line.name), **line.name._asdict(), "verdict": line.verdict, **numbers, "cause": line.cause}


def _number(value: float) -> float | None:
    """JSON has no infinities; what cannot be measured is null."""
    return value if math.isfinite(value) else None


def _tell(found: Comparison, html: Path | None) -> None:
    out = console(sys.stdout)
    for label, run in (("A", found.first), ("B", found.second)):
        out.print(f"{label}: {run.folder}: {_layout(run)}", markup=False, soft_wrap=True)
    verdicts = Counter(line.verdict for line in found.lines)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    steps = len({line.name.step for line in found.lines})
    out.print(f"{len(found.lines)} tensors of {steps} steps: {counts}", markup=False)
    if found.worst and found.worst.bound:
        out.print(f"nearest to its bound: {found.worst.name} {_measured(found.worst)}", markup=False, soft_wrap=True)
    _tell_faults(found, out)
    if html:
        out.print(f"wrote {html}", markup=False)


def _layout(run: Run) -> str:
    axes = [f"{axis} {size}" for axis, size in run.about.get("mesh", {}).items() if size > 1]
    count = run.about.get("accumulation", 1)
    plural = "es" * (count != 1)
    return f"{run.about.get('engine')}, {', '.join(axes) or 'one rank'}, {count} microbatch{plural} of a rank in a step"


def _tell_faults(found: Comparison, out: Console) -> None:
    first = found.divergence
    if first is None:
        proved = _exit(found) is Exit.CLEAN
        out.print("equal up to rounding" if proved else "no tensor was logged with values: nothing to compare")
        return
    out.print(f"\nthey part at {first.name}: {first.verdict}", style="red", markup=False, soft_wrap=True)
    out.print(f"  {_measured(first)}", markup=False)
    if first.cause:
        out.print(f"  likely cause: {first.cause}", markup=False, soft_wrap=True)
    rest = found.faults[1 : SHOWN + 1]
    if rest:
        out.print(f"\nthen, in order of execution ({len(rest)} of {len(found.faults) - 1} more):")
        rows = (_row(line, before) for before, line in zip((first, *rest), rest, strict=False))
        out.print(_table(("tensor", "verdict", "distance", "bound", "looks like"), rows))


def _measured(line: Line) -> str:
    if not math.isfinite(line.distance):
        return "no distance can be measured"
    return f"distance {line.distance:.2g} (share of the values, root mean square); rounding reaches {line.bound:.2g}"


def _row(line: Line, before: Line) -> tuple[str, ...]:
    cause = "the same" if line.cause == before.cause else line.cause
    return str(line.name), line.verdict, f"{line.distance:.2g}", f"{line.bound:.2g}", cause


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Grid:
    from rich.markup import escape

    table = Grid("", heads, ruled=False)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


# Showing


def _selected(run: Run, wanted: Selection) -> Iterator[Entry]:
    for step in run.steps if not wanted.steps else [step for step in run.steps if step in wanted.steps]:
        for entry in run.entries(step):
            layer = not wanted.layers or any(part in entry.name.layer for part in wanted.layers)
            if layer and (not wanted.kinds or entry.name.kind in wanted.kinds):
                yield entry


def _fields(entry: Entry, microbatches: bool) -> dict[str, Any]:
    samples = entry.samples
    fields: dict[str, Any] = {
        "name": str(entry.name),
        **entry.name._asdict(),
        "shape": list(entry.shape),
        "dtype": entry.first.dtype,
        "device": entry.first.device,
        "missing": entry.missing,
        "statistics": entry.summary and _statistics(entry.summary),
        "samples": None if samples is None else [_number(value) for value in samples.tolist()],
    }
    if microbatches:
        fields["microbatches"] = {str(index): _statistics(summary) for index, summary in entry.microbatches().items()}
    return fields


def _statistics(summary: Summary) -> dict[str, float | None]:
    return {"count": summary.count, **{name: _number(getattr(summary, name)) for name in STATISTICS}}


def _list(run: Run, entries: Sequence[Entry], microbatches: bool) -> None:
    out = console(sys.stdout)
    out.print(f"{run.folder}: {_layout(run)}", markup=False, soft_wrap=True)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        out.width = WIDE
    rows = (row for entry in entries for row in _lines(entry, microbatches))
    heads = ("tensor", "shape", "type", "mean", "std", "min", "max", "norm", "samples")
    out.print(_table(heads, rows))


WIDE = 240
"""Columns where the terminal does not say: one line for each tensor."""


def _lines(entry: Entry, microbatches: bool) -> Iterator[tuple[str, ...]]:
    shape, samples = "x".join(map(str, entry.shape)), entry.samples
    shown = "" if samples is None else " ".join(f"{value:.4g}" for value in samples[:SHOWN].tolist())
    missing = f" ({entry.missing} elements missing)" if entry.missing else ""
    yield str(entry.name) + missing, shape, entry.first.dtype, *_figures(entry.summary), shown
    for index, summary in entry.microbatches().items() if microbatches else ():
        yield f"  microbatch {index}", "", "", *_figures(summary), ""


def _figures(summary: Summary | None) -> tuple[str, ...]:
    if summary is None:
        return ("",) * 5
    odd = "".join(f" {count} {word}" for count, word in ((summary.nans, "NaN"), (summary.infs, "inf")) if count)
    figures = [f"{getattr(summary, name):.4g}" for name in ("mean", "std", "low", "high", "norm")]
    return (*figures[:-1], figures[-1] + odd)


def draw(entries: Sequence[Entry], statistic: str, path: Path) -> None:
    """A picture of one statistic over steps, a line for each tensor. Raises `BridgeError` if there is nothing to draw."""
    if find_spec("matplotlib") is None:
        raise BridgeError("--plot: matplotlib is not installed; pip install 'stagebridge[plot]'")
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = _series(entries, statistic)
    if not lines:
        raise BridgeError("--plot: these tensors were logged below level 2, without statistics; log them at 2 or more")
    figure = Figure(figsize=(10, max(5.0, 0.17 * len(lines))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for at, (label, points) in enumerate(lines.items()):
        style = ("-", "--", ":", "-.")[at // 10 % 4]
        axes.plot(list(points), list(points.values()), style, marker=".", label=label, linewidth=1.2)
    positive = all(value > 0 for points in lines.values() for value in points.values())
    axes.set_yscale("log" if positive else "linear")
    axes.set(xlabel="step", ylabel={"low": "smallest", "high": "largest"}.get(statistic, statistic))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_all({path: picture.getvalue()})


def _series(entries: Iterable[Entry], statistic: str) -> dict[str, dict[int, float]]:
    """For each tensor its statistic by step."""
    found: dict[str, dict[int, float]] = {}
    for entry in entries:
        if entry.summary is not None:
            label = clean(str(entry.name).partition("/")[2]).replace("$", r"\$")  # no formula
            found.setdefault(label, {})[entry.name.step] = float(getattr(entry.summary, statistic))
    return found
