"""The `trace` command: watch a training, compare two traced runs, or show what one logged."""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.progress import show_progress
from bridge.cli.project_settings import FILE as PROJECT, project
from bridge.cli.terminal import print_json, say
from bridge.errors import BridgeError, nearest
from bridge.files import write_all, write_text
from bridge.files.printable import clean
from bridge.report import json_types
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.tables import Grid
from bridge.stack.extras import install_command, need_engine
from bridge.trace.findings import FILE, MEANINGS
from bridge.trace.injected_watch import SETTINGS
from bridge.trace.run_liveness import APART, ATTACHED, mark_process

if TYPE_CHECKING:
    from rich.console import Console

    from bridge.trace.comparison import Comparison, Diagnosis
    from bridge.trace.run import LoggedTensor, TracedRun
    from bridge.trace.settings import SettingDifference
    from bridge.trace.summary import Summary
    from bridge.trace.verdicts import TensorVerdict

MEASURED = ("equal", "rounding")
"""Verdicts of tensors for which two values could be compared."""
STATISTICS = ("mean", "std", "low", "high", "norm", "nans", "infs")
"""Statistics of a tensor that a line shows and that can be plotted."""
SHOWN = 8
"""Largest number of printed differences after the first one, and of printed values of one tensor."""


@dataclass(frozen=True)
class Selection:
    """The tensors of a run to show: a part of the layer's name, kinds, steps (empty: all), and
    whether to show microbatches separately.
    """

    layers: Sequence[str] = ()
    kinds: Sequence[str] = ()
    steps: Sequence[int] = ()
    microbatches: bool = False


def diff(first: Path, second: Path, html: Path | None, every: bool, as_json: bool) -> int:
    """Compare two runs. Returns the exit code."""

    def work() -> int:
        from bridge.trace.run_comparison import compare_runs

        with show_progress("the steps"):
            # A page shows all steps; a report may end at the first that differs.
            comparison = compare_runs(
                _open_run(first), _open_run(second), every=every or html is not None
            )
        code = _exit_code(comparison)
        if html:
            write_text(html, _page_of_comparison(comparison))
        print_json(
            {**_comparison_object(comparison), "exit_code": code}
        ) if as_json else _print_comparison(comparison, html)
        return code

    return _answer_errors(as_json, work)


def _page_of_comparison(comparison: Comparison) -> str:
    from bridge.trace.pages.page import comparison_page
    from bridge.trace.pages.series import read_findings, series_of_run

    first, second = (
        series_of_run(run, read_findings(run.folder))
        for run in (comparison.first, comparison.second)
    )
    return comparison_page(comparison, (first, second))


def html(first: Path, second: Path | None, out: Path) -> int:
    """Write a page of one run, or of two compared runs. Returns the exit code, which tells whether
    faults or differences were found.
    """

    def work() -> int:
        from bridge.trace.pages.page import run_page
        from bridge.trace.pages.series import read_series
        from bridge.trace.run_comparison import compare_runs

        if second is None:
            series = read_series(first)
            code = (
                Exit.FINDINGS
                if any(finding.severity == "fault" for finding in series.findings)
                else Exit.CLEAN
            )
            text = run_page(series)
        else:
            comparison = compare_runs(_open_run(first), _open_run(second))
            code, text = _exit_code(comparison), _page_of_comparison(comparison)
        write_text(out, text)
        say(f"wrote {out}")
        return code

    return _answer_errors(False, work)


@dataclass(frozen=True)
class Kept:
    """The limits on the log of `trace run`, as typed: log only each step that `every` divides, only
    some ranks, one copy of equal tensors, at most so many bytes.
    """

    every: int = 1
    ranks: str | None = None
    once: bool = False
    budget: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the limits as arguments of `bridge.trace.retention.Keep`.

        Raises `BridgeError` for a malformed limit.
        """
        budget = None if self.budget is None else _parse_bytes(self.budget)
        return {
            "every": self.every,
            "ranks": _parse_numbers(self.ranks),
            "once": self.once,
            "budget": budget,
        }


SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]?I?B)", text.strip().upper())
    size = int(float(match[1]) * SIZES.get(match[2], 0)) if match else 0
    if size < 1:
        raise BridgeError(
            f"--budget: found {text}, expected a number of bytes with its unit, such as 500MB or "
            "2GB"
        )
    return size


def _parse_numbers(text: str | None) -> list[int]:
    numbers: list[int] = []
    for part in (text or "").split(",") if text is not None else ():
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise BridgeError(
                f"--ranks: found {text}, expected ranks and ranges, such as 0,3 or 0-7"
            )
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return sorted(set(numbers))


def start_traced(
    command: Sequence[str],
    folder: Path,
    level: int | None,
    on_finding: str | None,
    keep: Kept,
    accepted: Collection[str] = (),
) -> int:
    """Run a command and watch its trainings. Returns the command's exit code if it failed, else
    the code for the findings. Faults in `accepted`, each as "id:place", do not count.
    """
    import json
    import os
    import subprocess

    from bridge.trace.schema import RUN

    need_engine("trace")
    if not command:
        raise BridgeError(
            "trace run: found no command, expected one after --: stagebridge trace run -- torchrun train.py"
        )
    lasting = project().accept
    pairs = (
        *(("--accept", one) for one in accepted),
        *((f"{PROJECT}: tool.stagebridge.trace.accept", one) for one in lasting),
    )
    BridgeError.raise_if(
        f"trace run: {origin}: {one}: expected ID:PLACE, an id of a finding and the layer or parameter that it names"
        for origin, one in pairs
        if one.partition(":")[0] not in MEANINGS or not one.partition(":")[2]
    )
    for name in (ATTACHED, FILE):
        # Left by an earlier run in the same folder, they would tell of a training that was not this one.
        for place in (folder, *folder.glob(f"{APART}*")):
            (place / name).unlink(missing_ok=True)
    logs = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
    debug = {**dict.fromkeys(logs if level else (), level), "tensor_parallel": True}
    settings = {
        "run": str(folder.absolute()),
        "debug": debug,
        "on_finding": on_finding,
        "keep": keep.settings(),
    }
    import bridge.trace

    # Python imports `sitecustomize` of the first folder on the path in every process, and that attaches the watching.
    own = [Path(bridge.trace.__file__).parent / "injection", Path(bridge.trace.__file__).parents[2]]
    paths = [*map(str, own), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        SETTINGS: json.dumps(settings),
        "PYTHONPATH": os.pathsep.join(paths),
    }

    end = mark_process(folder)
    try:
        code = subprocess.run(list(command), env=environment, check=False).returncode
    except OSError as error:
        raise BridgeError(
            f"trace run: {command[0]}: {error.strerror}; name a command that runs in this shell"
        ) from None
    finally:
        end()
    for note in _open_run(folder).notes if (folder / RUN).exists() else ():
        print(f"trace run: {folder}: {note}", file=sys.stderr)
    places = [
        place
        for place in (folder, *sorted(folder.glob(f"{APART}*")))
        if (place / ATTACHED).exists()
    ]
    if not places:
        say(
            "trace run: nothing was watched: no module whose weights an optimizer or an engine holds"
            " ran forward in training mode; Python processes started with -I or -E cannot be"
            " watched"
        )
        # A training that failed keeps its own code: schedulers of jobs go by it.
        return code or Exit.UNPROVED
    files = [place / FILE for place in places if (place / FILE).exists()]
    lines = [line for file in files for line in file.read_text().splitlines()]
    findings = [json.loads(line) for line in lines]
    every = [f"{one['id']}:{one['where'] or 'the run'}" for one in findings]
    some = [
        one["severity"]
        for one, name in zip(findings, every, strict=True)
        if name not in {*accepted, *lasting}
    ]
    faults, gone = some.count("fault"), [one for one in accepted if one not in every]
    more = f" ({len(every) - len(some)} more were accepted)" if len(some) < len(every) else ""
    say(
        f"trace run: {faults} faults and {len(some) - faults} remarks{more}; {', '.join(map(str, places))}"
    )
    for name in gone:
        say(f"trace run: --accept {name}: there was no such finding; remove the option")
    return code or (Exit.FINDINGS if faults else Exit.CLEAN)


def show(
    folder: Path, selection: Selection, plot: Path | None, statistic: str, as_json: bool
) -> int:
    """Show the tensors of a run."""

    def work() -> int:
        if statistic not in STATISTICS:
            raise BridgeError(
                f"--statistic: found {statistic}, expected {', '.join(STATISTICS)}{nearest(statistic, STATISTICS)}"
            )
        run = _open_run(folder)
        entries = tuple(_select_entries(run, selection))
        if not entries:
            raise BridgeError(f"{folder}: no tensor passes these filters; {_run_text(run)}")
        if plot:
            draw_statistic(entries, statistic, plot)
        if as_json:
            tensors = [_entry_object(entry, selection.microbatches) for entry in entries]
            print_json({**_head_object(run), "tensors": tensors, "exit_code": Exit.CLEAN})
        elif plot:
            say(f"wrote {plot}")
        else:
            _print_entries(run, entries, selection.microbatches)
        return Exit.CLEAN

    return _answer_errors(as_json, work)


def _answer_errors(as_json: bool, work: Callable[[], int]) -> int:
    """Run `work`; with --json an error is an object on stdout as well."""
    try:
        need_engine("trace")
        return work()
    except BridgeError as error:
        error.as_object = as_json
        raise


def _exit_code(comparison: Comparison) -> Exit:
    """Return the exit code: findings if the runs differ, unproved if no tensor has values in both logs."""
    if comparison.divergence:
        return Exit.FINDINGS
    return (
        Exit.CLEAN if any(line.verdict in MEASURED for line in comparison.lines) else Exit.UNPROVED
    )


def _open_run(folder: Path) -> TracedRun:
    from bridge.trace.run import TracedRun

    return TracedRun.read(folder)


def _run_text(run: TracedRun) -> str:
    steps = f"steps {run.steps[0]} to {run.steps[-1]}" if run.steps else "no whole step"
    kinds = sorted({entry.name.kind for entry in run.entries(run.steps[-1])}) if run.steps else ()
    return f"the run has {steps}, layers {', '.join(run.about.get('layers', ()))}, and in the last step: {', '.join(kinds)}"


# Comparing


def _comparison_object(comparison: Comparison) -> dict[str, Any]:
    return {
        "first": _head_object(comparison.first),
        "second": _head_object(comparison.second),
        "verdicts": dict(Counter(line.verdict for line in comparison.lines)),
        "settings": [_setting_object(setting) for setting in comparison.settings],
        "divergence": _line_object(comparison.divergence) if comparison.divergence else None,
        "diagnosis": _diagnosis_object(comparison.diagnosis) if comparison.diagnosis else None,
        "steps_left": list(comparison.left),
        "faults": [_line_object(line) for line in comparison.faults],
        "worst": _line_object(comparison.worst) if comparison.worst else None,
        "heat": {
            layer: {str(step): _finite_number(share) for step, share in row.items()}
            for layer, row in comparison.heat().items()
        },
    }


def _head_object(run: TracedRun) -> dict[str, Any]:
    facts = {key: run.about.get(key) for key in ("engine", "mesh", "accumulation", "formats")}
    return {"folder": str(run.folder), **facts, "notes": list(run.notes)}


def _line_object(line: TensorVerdict) -> dict[str, Any]:
    numbers = {"distance": _finite_number(line.distance), "bound": _finite_number(line.bound)}
    values = {"verdict": line.verdict, **numbers, "cause": line.cause, "ranks": list(line.ranks)}
    return {"name": str(line.name), **line.name._asdict(), **values}


def _setting_object(setting: SettingDifference) -> json_types.Setting:
    return {
        "path": setting.path,
        "first": setting.first,
        "second": setting.second,
        "layout": setting.layout,
    }


def _diagnosis_object(diagnosis: Diagnosis) -> json_types.Diagnosed:
    return {
        "where": str(diagnosis.where),
        "claim": diagnosis.claim,
        "evidence": list(diagnosis.evidence),
        "next": diagnosis.next,
    }


def _finite_number(value: float) -> float | None:
    """Return the number for JSON, or None if it is infinite or NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def _print_comparison(comparison: Comparison, html: Path | None) -> None:
    out = console(sys.stdout)
    both = (("A", comparison.first), ("B", comparison.second))
    for label, note in ((label, note) for label, run in both for note in run.notes):
        out.print(f"{label}: {note}", markup=False, soft_wrap=True)
    for label, run in both:
        out.print(f"{label}: {run.folder}: {run.layout}", markup=False, soft_wrap=True)
    _tell_settings(comparison, out)
    verdicts = Counter(line.verdict for line in comparison.lines)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    steps = len({line.name.step for line in comparison.lines})
    out.print(f"{len(comparison.lines)} tensors of {steps} steps: {counts}", markup=False)
    last = min((run.steps[-1] for _, run in both if run.steps), default=-1)
    for label, run in both:
        if rest := [step for step in run.steps if step > last]:
            line = f"{label} goes on, and its steps {rest[0]} to {rest[-1]} are not compared"
            out.print(line, markup=False, soft_wrap=True)
    if comparison.worst and comparison.worst.bound:
        out.print(
            f"nearest to the bound of rounding: {comparison.worst.name} {_distance_text(comparison.worst)}",
            markup=False,
            soft_wrap=True,
        )
    _tell_faults(comparison, out)
    if html:
        out.print(f"wrote {html}", markup=False)


def _tell_settings(comparison: Comparison, out: Console) -> None:
    """Print the settings that differ: first settings of the training, then settings of the layout."""
    for layout, words in ((False, "settings differ"), (True, "layouts differ")):
        texts = [str(setting) for setting in comparison.settings if setting.layout is layout]
        if texts:
            more = f"; and {len(texts) - SHOWN} more settings" if len(texts) > SHOWN else ""
            out.print(f"{words}: {'; '.join(texts[:SHOWN])}{more}", markup=False, soft_wrap=True)


def _tell_faults(comparison: Comparison, out: Console) -> None:
    first = comparison.divergence
    if first is None:
        certain = _exit_code(comparison) is Exit.CLEAN
        out.print(
            "equal up to rounding"
            if certain
            else "no tensor was logged with values: nothing to compare"
        )
        return
    out.print(
        f"\nthe runs first differ at {first.name}: {first.verdict}",
        style="red",
        markup=False,
        soft_wrap=True,
    )
    out.print(f"  {_distance_text(first)}", markup=False, soft_wrap=True)
    if first.ranks:
        word = "rank" if len(first.ranks) == 1 else "ranks"
        out.print(f"  only on {word} {', '.join(map(str, first.ranks))} of A", markup=False)
    if first.cause:
        out.print(f"  looks like: {first.cause}", markup=False, soft_wrap=True)
    why = comparison.diagnosis
    if why and why.claim:
        out.print(f"  cause: {why.claim}", markup=False, soft_wrap=True)
    for line in why.evidence if why else ():
        out.print(
            f"    evidence: {line}" if why and why.claim else f"  before it: {line}",
            markup=False,
            soft_wrap=True,
        )
    if why and why.next:
        out.print(f"  these logs show no cause; next: {why.next}", markup=False, soft_wrap=True)
    _tell_rest(comparison, out)


def _tell_rest(comparison: Comparison, out: Console) -> None:
    """Print the differences after the first, by step, phase and kind in order of execution."""
    groups: dict[tuple[int, str, str], list[TensorVerdict]] = {}
    for line in comparison.lines:
        groups.setdefault((line.name.step, line.name.phase, line.name.kind), []).append(line)
    faults = {
        key: [line for line in lines if line.is_fault and line != comparison.divergence]
        for key, lines in groups.items()
    }
    rest = [(key, lines) for key, lines in faults.items() if lines][:SHOWN]
    if rest:
        out.print("\nfurther differences, in order of execution:")
        rows = []
        for (step, phase, kind), lines in rest:
            first, count = lines[0], f"{len(lines)} of {len(groups[step, phase, kind])}"
            rows.append(
                (
                    f"{step}/{phase}",
                    kind,
                    count,
                    str(first.name),
                    f"{first.distance:.2g}",
                    first.cause,
                )
            )
        out.print(_make_table(("step", "kind", "differ", "first", "distance", "looks like"), rows))
    if comparison.left:
        out.print(
            f"steps after step {comparison.lines[-1].name.step} were left out ({len(comparison.left)}); --all compares them"
        )


def _distance_text(line: TensorVerdict) -> str:
    if not math.isfinite(line.distance):
        return "no distance can be measured"
    return (
        f"distance {line.distance:.2g} (root mean square, as a share of the values); rounding "
        f"explains at most {line.bound:.2g}"
    )


def _make_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Grid:
    from rich.markup import escape

    table = Grid("", heads, ruled=False)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


# Showing


def _select_entries(run: TracedRun, selection: Selection) -> Iterator[LoggedTensor]:
    for step in (
        run.steps
        if not selection.steps
        else [step for step in run.steps if step in selection.steps]
    ):
        for entry in run.entries(step):
            layer = not selection.layers or any(
                part in entry.name.layer for part in selection.layers
            )
            if layer and (not selection.kinds or entry.name.kind in selection.kinds):
                yield entry


def _entry_object(entry: LoggedTensor, microbatches: bool) -> dict[str, Any]:
    samples = entry.samples
    fields: dict[str, Any] = {
        "name": str(entry.name),
        **entry.name._asdict(),
        "shape": list(entry.shape),
        "dtype": entry.first.dtype,
        "device": entry.first.device,
        "missing": entry.missing,
        "statistics": entry.summary and _statistics_object(entry.summary),
        "samples": None
        if samples is None
        else [_finite_number(value) for value in samples.tolist()],
    }
    if microbatches:
        fields["microbatches"] = {
            str(index): _statistics_object(summary)
            for index, summary in entry.microbatches().items()
        }
    return fields


def _statistics_object(summary: Summary) -> dict[str, float | None]:
    return {
        "count": summary.count,
        **{name: _finite_number(getattr(summary, name)) for name in STATISTICS},
    }


def _print_entries(run: TracedRun, entries: Sequence[LoggedTensor], microbatches: bool) -> None:
    out = console(sys.stdout)
    out.print(f"{run.folder}: {run.layout}", markup=False, soft_wrap=True)
    # In a pipe each tensor gets a line of its own, so that `grep` finds all of it.
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        out.width = WIDE
    rows = (row for entry in entries for row in _entry_lines(entry, microbatches))
    heads = ("tensor", "shape", "type", "mean", "std", "min", "max", "norm", "samples")
    out.print(_make_table(heads, rows))


WIDE = 240
"""Number of columns of a list that does not go to a terminal: wide enough for one line for each
tensor.
"""


def _entry_lines(entry: LoggedTensor, microbatches: bool) -> Iterator[tuple[str, ...]]:
    shape, samples = "x".join(map(str, entry.shape)), entry.samples
    values = (
        "" if samples is None else " ".join(f"{value:.4g}" for value in samples[:SHOWN].tolist())
    )
    missing = f" ({entry.missing} elements missing)" if entry.missing else ""
    yield str(entry.name) + missing, shape, entry.first.dtype, *_figure_texts(entry.summary), values
    for index, summary in entry.microbatches().items() if microbatches else ():
        yield f"  microbatch {index}", "", "", *_figure_texts(summary), ""


def _figure_texts(summary: Summary | None) -> tuple[str, ...]:
    if summary is None:
        return ("",) * 5
    odd = "".join(
        f" {count} {word}"
        for count, word in ((summary.nans, "NaN"), (summary.infs, "inf"))
        if count
    )
    figures = [f"{getattr(summary, name):.4g}" for name in ("mean", "std", "low", "high", "norm")]
    return (*figures[:-1], figures[-1] + odd)


def draw_statistic(entries: Sequence[LoggedTensor], statistic: str, path: Path) -> None:
    """Draw one statistic over steps, with a line for each tensor.

    Raises `BridgeError` if there is nothing to draw.
    """
    if find_spec("matplotlib") is None:
        raise BridgeError(f"--plot: matplotlib is not installed; {install_command('plot')}")
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = _series_by_tensor(entries, statistic)
    if not lines:
        raise BridgeError(
            "--plot: these tensors were logged below level 2, without statistics; log them at level 2 or more"
        )
    figure = Figure(figsize=(10, max(5.0, 0.17 * len(lines))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for at, (label, points) in enumerate(lines.items()):
        # Matplotlib has ten colours; after them the style of the line changes.
        style = ("-", "--", ":", "-.")[at // 10 % 4]
        axes.plot(
            list(points), list(points.values()), style, marker=".", label=label, linewidth=1.2
        )
    # A logarithm shows norms that fall by orders of magnitude; 0 and below have none.
    positive = all(value > 0 for points in lines.values() for value in points.values())
    axes.set_yscale("log" if positive else "linear")
    axes.set(xlabel="step", ylabel={"low": "smallest", "high": "largest"}.get(statistic, statistic))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_all({path: picture.getvalue()})


def _series_by_tensor(
    entries: Iterable[LoggedTensor], statistic: str
) -> dict[str, dict[int, float]]:
    """Return the statistic of each tensor by step."""
    series: dict[str, dict[int, float]] = {}
    for entry in entries:
        if entry.summary is not None:
            label = clean(str(entry.name).partition("/")[2]).replace("$", r"\$")  # no formula
            series.setdefault(label, {})[entry.name.step] = float(getattr(entry.summary, statistic))
    return series
