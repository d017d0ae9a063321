"""The gate of `check`, `convert` and `diff`: which findings take effect, how they are reported, and
for which files.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.file_search import expand_names
from bridge.cli.job import Job
from bridge.cli.patterns import refuse_strange
from bridge.cli.project_settings import apply_project_settings, project
from bridge.cli.terminal import complain, print_json, say
from bridge.errors import BridgeError, SourceError, UnrecognisedError, nearest
from bridge.files import read_text, write_text
from bridge.files.progress import count_items
from bridge.report import as_text
from bridge.report.as_json import exit_of
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.row_choice import View
from bridge.report.sarif import (
    FORMATS,
    REFUSED,
    Choice,
    Record,
    baseline,
    read_baseline,
    record,
    refusals,
)
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import How

if TYPE_CHECKING:
    from bridge.api.convert import Converted

TEXT, JSON = "text", "json"

EVERY = Choice()


@dataclass(frozen=True)
class Gate:
    """The choice of findings that decide the exit code, the format of the report, and the baseline file to write."""

    choice: Choice = EVERY
    format: str = TEXT
    write_baseline: Path | None = None
    fail_on: str | None = None
    exclude: tuple[str, ...] = ()

    def job(self, job: Job) -> Job:
        """Return the job with the settings of the gate.

        They are the threshold, unless the job has its own, and JSON output if the gate wants it.
        """
        return replace(
            job,
            fail_on=self.fail_on if job.fail_on is None else job.fail_on,
            json=job.json or self.format == JSON,
        )

    @property
    def is_one_list(self) -> bool:
        """Whether the findings of all files are reported together as one list, as in SARIF or GitHub format."""
        return self.format not in (TEXT, JSON)


OPEN = Gate()
"""The gate that lets every finding through."""


def gate_of(
    select: Sequence[str] | None,
    ignore: Sequence[str] | None,
    known: Path | None,
    format: str | None,
    as_json: bool = False,
    write_baseline: Path | None = None,
) -> Gate:
    """Return the gate.

    Options win over [tool.stagebridge] in the pyproject.toml of the working directory, or of the
    nearest parent folder that has one. `as_json` is the option --json.
    """
    if as_json and format not in (None, JSON):
        raise BridgeError(f"--json --format {format}: two formats; keep one of the options")
    settings = project()
    if settings.baseline:
        known = known or settings.folder / settings.baseline
    # A new baseline is made of all findings: with the old one in force it would miss those that are known today.
    place = None if write_baseline else known
    chosen = JSON if as_json else format or settings.format or TEXT
    if chosen not in (TEXT, *FORMATS):
        raise BridgeError(
            f"--format: found {chosen}, expected {', '.join((TEXT, *FORMATS))}{nearest(chosen, FORMATS)}"
        )
    rows = read_baseline(read_text(place), str(place)) if place else frozenset()
    choice = Choice((*settings.select, *(select or ())), (*settings.ignore, *(ignore or ())), rows)
    refuse_strange(choice.select, choice.ignore)
    return Gate(choice, chosen, write_baseline, settings.fail_on, settings.exclude)


# Many files


@dataclass(frozen=True)
class Looked:
    """The result for one file: its config and the findings that the gate lets through, or the
    problems for which the file is refused.
    """

    file: str
    config: Config | None = None
    findings: tuple[Finding, ...] = ()
    problems: tuple[str, ...] = ()
    stranger: bool = False
    converted: Converted | None = None

    @property
    def conversion(self) -> Converted:
        """The conversion of the file, which was converted."""
        assert self.converted is not None
        return self.converted

    def exit(self, job: Job) -> Exit:
        """Return the exit code for this file."""
        return Exit.ERROR if self.problems else exit_of(self.findings, job.threshold)

    @property
    def complaints(self) -> list[str]:
        """The problems, each with the name of the file."""
        return [
            problem if problem.startswith(self.file) else f"{self.file}: {problem}"
            for problem in self.problems
        ]

    @property
    def records(self) -> list[Record]:
        """The records of this file: its problems if the file is refused, else its findings."""
        if self.config is None:
            return list(refusals(self.problems, self.file))
        # A default of the target belongs to no setting of the source, so its help is that of the target.
        target = self.converted.result.config if self.converted else self.config
        return [
            record(
                one, self.file, (target if one.how is How.DEFAULTED else self.config).dialect.name
            )
            for one in self.findings
        ]


def look_at_files(
    job: Job,
    files: Sequence[tuple[str, bool]],
    work: Callable[[Job], Looked],
    tell: Callable[[Looked], None] = lambda found: None,
) -> list[Looked]:
    """Return the result of `work` for each file, with the project's settings for it. `tell` gets each result.

    If no stack recognises a file that the user did not name (a folder or pattern did), the result
    is marked as `stranger`.
    """
    found = list[Looked]()
    for file, is_named in count_items(files):
        one = apply_project_settings(job, file)
        try:
            found.append(work(one))
        except BridgeError as error:
            stranger = not is_named and isinstance(error, UnrecognisedError)
            problems = () if stranger else error.problems
            found.append(Looked(file, problems=problems, stranger=stranger))
        tell(found[-1])
    return found


def worst_code(codes: Iterable[int]) -> int:
    """Return the worst of several exit codes: an error, then findings, then an incomplete proof."""
    present = set(codes)
    # From the worst: a run that stops says more than other numbers, and those more than a missing proof.
    return next(
        (code for code in (Exit.ERROR, Exit.FINDINGS, Exit.UNPROVED) if code in present), Exit.CLEAN
    )


def report_files(
    files: Sequence[Looked],
    job: Job,
    gate: Gate,
    view: View,
    each: Callable[[Looked], Mapping[str, Any]],
) -> int:
    """Report the results of several files in the gate's format. Returns the exit code."""
    code = worst_code(one.exit(job) for one in files)
    records = [row for one in files for row in one.records]
    if gate.write_baseline:
        write_text(gate.write_baseline, baseline(records, gate.write_baseline))
        say(
            f"wrote {gate.write_baseline}: {sum(row.rule != REFUSED for row in records)} known findings",
            sys.stderr,
        )
        # What the baseline has is known from now on: only a file that could not be read still fails.
        code = (
            Exit.ERROR if code == Exit.ERROR and any(one.problems for one in files) else Exit.CLEAN
        )
    if gate.is_one_list:
        print(FORMATS[gate.format](records, code))
    elif job.json:
        print_json(
            {
                "files": [{"file": one.file, **each(one)} for one in files if not one.stranger],
                "exit_code": code,
            }
        )
    else:
        _print_texts(files, view)
    return code


def _print_texts(files: Sequence[Looked], view: View) -> None:
    out = console(sys.stdout)
    for one in files:
        if one.stranger:
            continue
        if one.config is None:
            say(f"{one.file}: refused")
            complain(one.complaints)
        else:
            as_text.one_of_many(one.file, one.findings, out, view)
    hidden = sum(as_text.unshown(one.findings, view) for one in files)
    more = f"; {hidden} finding{'' if hidden == 1 else 's'} without effect (--all shows them)"
    say(summary_line(files, as_text.kind_checked) + (more if hidden else ""))


def summary_line(files: Sequence[Looked], kind: Callable[[Sequence[Finding]], str]) -> str:
    """Return the closing line: how many files there are of each kind of verdict."""
    configs = [one for one in files if not one.stranger]
    counts = {
        "refused": sum(one.config is None for one in configs),
        **Counter(kind(one.findings) for one in configs if one.config is not None),
        "of no stack": len(files) - len(configs),
    }
    summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return (
        f"{len(configs)} file{'' if len(configs) == 1 else 's'}: {summary or 'nothing to look at'}"
    )


def files_of(names: Sequence[str], gate: Gate) -> list[tuple[str, bool]]:
    """Return each file with true if the user named it, or false if a pattern or folder did.

    Raises `SourceError` if there are no files.
    """
    files = list(expand_names(names, gate.exclude))
    if not files:
        raise SourceError(f"{', '.join(names)}: no file that may be a config; name one")
    return files
