"""The command `diff`: print where two configs differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

from bridge.api.diff import diff as compare_sources
from bridge.cli.budget import stay_within_limits
from bridge.cli.check import refuse_other_baseline
from bridge.cli.job import Job, answer
from bridge.cli.many_files import OPEN, Gate
from bridge.cli.project_settings import apply_project_settings
from bridge.cli.terminal import note, print_json
from bridge.files import write_text
from bridge.plan.section import fields
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.row_choice import USUAL, View
from bridge.report.sarif import FORMATS, baseline, record
from bridge.stack.dialect import Config
from bridge.stack.findings import DIFFERENCE, Finding


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
