"""The commands `check`, of one file or of many as a gate, and `diff`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from shlex import quote
from typing import Any

from bridge.api.check import check as check_source
from bridge.api.diff import diff as compare_sources
from bridge.cli import progress
from bridge.cli.budget import stay_within_limits
from bridge.cli.file_search import may_be_several
from bridge.cli.job import Job, answer
from bridge.cli.many_files import OPEN, Gate, Looked, files_of, look_at_files, report_files
from bridge.cli.project_settings import apply_project_settings
from bridge.cli.terminal import note, print_json
from bridge.errors import BridgeError
from bridge.files import write_text
from bridge.plan.section import fields
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.row_choice import USUAL, View
from bridge.report.sarif import FORMATS, baseline, is_baseline, record
from bridge.stack.dialect import Config
from bridge.stack.findings import DIFFERENCE, Finding
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


def diff(job: Job, other: str, view: View = USUAL, gate: Gate = OPEN) -> int:
    """Compare the meanings of two files. Returns the exit code."""
    job, names = gate.job(job), (job.file, other)
    with answer(job), stay_within_limits():
        refuse_other_baseline(gate, names)
        difference = compare_sources(*(apply_project_settings(job, name) for name in names))
        findings = gate.choice.of(difference.findings, other)
        code = as_json.exit_of(findings, job.threshold)
        one, two = difference.sides
        records = [
            replace(
                record(finding, other, two.dialect.name), help=_help_command(finding, (two, one))
            )
            for finding in findings
        ]
        if gate.write_baseline:
            write_text(gate.write_baseline, baseline(records, gate.write_baseline))
            note(f"wrote {gate.write_baseline}: {len(records)} known findings")
            return Exit.CLEAN
        if gate.is_one_list:
            print(FORMATS[gate.format](records, code))
        elif job.json:
            print_json(as_json.difference_json(names, difference.sides, findings, code))
        else:
            as_text.print_differences(names, difference.sides, findings, console(sys.stdout), view)
        return code


def _help_command(finding: Finding, sides: Sequence[Config]) -> str:
    """Return the command that shows the field of a difference, or an empty text if it is a field of
    neither stack.
    """
    # Of a setting in a section, the rule names the section.
    for path in (finding.path, finding.id.removeprefix(f"{DIFFERENCE}/")):
        for side in sides:
            if path in fields(side.dialect.schema):
                return f"stagebridge show {side.dialect.name} {quote(path)}"
    return ""
