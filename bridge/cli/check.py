"""The command `check`: one file, or many as a gate."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bridge.api.check import check as check_source
from bridge.cli import progress
from bridge.cli.budget import stay_within_limits
from bridge.cli.file_search import may_be_several
from bridge.cli.job import Job, answer
from bridge.cli.many_files import OPEN, Gate, Looked, files_of, look_at_files, report_files
from bridge.cli.terminal import print_json
from bridge.errors import BridgeError
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.row_choice import USUAL, View
from bridge.report.sarif import is_baseline
from bridge.translation.write_outputs import not_over_input, refuse_other


def check(job: Job, view: View = USUAL, gate: Gate = OPEN, names: Sequence[str] = ()) -> int:
    """Check one file, or several. Returns the exit code."""
    job = gate.job(job)
    with answer(job):
        if gate.is_one_list or gate.write_baseline or may_be_several(names):
            return _check_all(job, view, gate, names or (job.file,))
        with stay_within_limits():
            with _name_file(job):
                entry = _look(job, gate)
            assert entry.config is not None
            if job.json:
                print_json(as_json.check_json(entry.config, job.threshold, entry.findings))
            else:
                out = console(sys.stdout)
                as_text.check_text(entry.config, out, view, entry.findings, job.file_name)
        return entry.exit(job)


def _look(job: Job, gate: Gate) -> Looked:
    result = check_source(job)
    return Looked(job.file, result.config, gate.choice.of(result.findings, job.file))


@contextmanager
def _name_file(job: Job) -> Iterator[None]:
    """Context in which every error names the file, as the command may run in a loop over files or in
    a git hook, where nothing else names the file.
    """
    try:
        yield
    except BridgeError as error:
        if job.file_name and not job.json:
            error.reword(
                # Options, and other files that this one names, are places of their own.
                one
                if one.startswith((job.file_name, "--")) or re.match(r"\S+: line \d", one)
                else f"{job.file_name}: {one}"
                for one in error.problems
            )
        raise


def _check_all(job: Job, view: View, gate: Gate, names: Sequence[str]) -> int:
    def work(one: Job) -> Looked:
        with stay_within_limits():
            return _look(one, gate)

    def each(one: Looked) -> Mapping[str, Any]:
        if one.config is None:
            return {"problems": list(one.problems), "exit_code": Exit.ERROR}
        return as_json.check_json(one.config, job.threshold, one.findings)

    files = files_of(names, gate)
    refuse_other_baseline(gate, (file for file, named in files if named))
    with progress.show_progress("the files"):
        entry = look_at_files(replace(job, loose=True), files, work)
    return report_files(entry, job, gate, view, each)


def refuse_other_baseline(gate: Gate, files: Iterable[str]) -> None:
    """Raise `SourceError` if --write-baseline names one of `files`, or a file that is not a baseline."""
    if gate.write_baseline:
        for file in files:
            not_over_input(file, [gate.write_baseline])
        refuse_other(gate.write_baseline, "a baseline", is_baseline)
