"""The command `verify`: print whether two configs are the same run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.api.access import limit_access
from bridge.api.verify import VerifyOptions, measure, own_of
from bridge.cli.job import Job, answer
from bridge.cli.progress import ProgressPrinter, end_orderly
from bridge.cli.project_settings import apply_project_settings
from bridge.cli.terminal import print_json
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.tables import Grid
from bridge.stack.extras import need_engine
from bridge.verify.local import Fields


def verify(
    job: Job,
    other: str | None,
    model: Path | None,
    batch: Path | None,
    on: str | None,
    asked: Mapping[str, Any],
) -> int:
    """Verify one file. Returns the exit code."""
    second = None if other is None else apply_project_settings(job, other)
    own = own_of(job.file, second, asked["to"], model, batch, on)
    options = VerifyOptions(**asked, own=own)
    with answer(job), limit_access(job):
        need_engine("verify")
        with end_orderly():
            fields = measure(
                job, options, (lambda said: None) if job.json else ProgressPrinter().hear
            )
        # If a side did not run, or not whole, a part is no proof.
        code = {"differs": Exit.FINDINGS, "same": Exit.CLEAN}.get(fields["verdict"], Exit.UNPROVED)
        if job.json:
            print_json({**fields, "exit_code": code})
        else:
            _print_verdicts(fields)
        return code


SHOWN = 3
VERDICTS = {
    "same": "Same run",
    "differs": "Not the same run",
    "in part": "Proved in part",
    "not run": "Nothing proved",
}


def _print_verdicts(fields: Fields) -> None:
    out = console(sys.stdout)
    lacking = f": {'; '.join(fields['lacking'])}" if fields["lacking"] else ""
    out.print(f"{VERDICTS[fields['verdict']]}{lacking}.", markup=False, soft_wrap=True)
    table = Grid("", ("run", "engine", "loss", "gradient norm", "furthest tensor", "verdict"))
    for run in fields["runs"]:
        table.add_row(*_run_cells(run))
    out.print(table)
    for line in _words_below(fields):
        out.print(line, markup=False)


def _run_cells(run: Fields) -> Iterator[str]:
    spelling = "as written" if run["as_written"] else "as meant"
    yield f"{run['side']}, {spelling}"
    yield run["engine"]
    losses, norms, gap = run["losses"], run["grad_norms"], run["distance"]
    yield f"{float(losses[0]):.6f} -> {float(losses[-1]):.6f}" if losses else ""
    yield (
        ""
        if not norms
        else "not told"
        if norms[-1] is None
        else f"{float(norms[0]):.5g} -> {float(norms[-1]):.5g}"
    )
    yield f"{gap['tensor'].removesuffix('.weight')}  {float(gap['worst']):.1e}" if gap else ""
    yield run["verdict"]


def _words_below(fields: Fields) -> Iterator[str]:
    """Yield the lines below the table: causes, changed sizes, and the differences that rounding
    alone makes.
    """
    for run in fields["runs"]:
        if run["cause"]:
            yield f"{run['side']} on {run['engine']}: {run['verdict']}: {run['cause']}"
    if fields["judged_release"]:
        yield fields["judged_release"]
    if fields["no_script"]:
        why = "; ".join(fields["no_script"])
        yield (
            "Both sides ran with this model; the training script of `convert --script` has the "
            f"nearest model that it can build: {why}"
        )
    smaller = [
        f"{path} {change['before']} -> {change['after']}"
        for path, change in fields["changes"].items()
    ]
    shrinking = f"; values changed to fit: {', '.join(smaller)}" if smaller else ""
    yield f"\nRun at small sizes, on {fields['ranks']} ranks{shrinking}."
    loss, update = (float(fields["rounding"][name]) for name in ("loss", "update"))
    yield f"Rounding alone changes losses by {loss:.0e}, updates by {update:.0e}."
    if names := fields["left_out"]:
        some = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        yield f"Rounding alone decides the updates of {len(names)} tensors, whose true gradients are zero; not compared: {some}."
