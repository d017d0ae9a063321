"""The command `convert`: one file, or several into a folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.api.convert import Converted, convert as convert_source
from bridge.api.source import STDIN
from bridge.cli import progress
from bridge.cli.budget import stay_within_limits
from bridge.cli.file_search import may_be_several
from bridge.cli.job import Job, answer
from bridge.cli.many_files import (
    OPEN,
    Gate,
    Looked,
    files_of,
    look_at_files,
    summary_line,
    worst_code,
)
from bridge.cli.terminal import complain, content, note, print_json, say
from bridge.errors import BridgeError, SourceError, TranslationError
from bridge.files import obstacles
from bridge.files.commits import GIT
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.row_choice import USUAL, View
from bridge.report.sarif import FORMATS
from bridge.stack import registry
from bridge.translation.translate import Result
from bridge.translation.write_outputs import differences

SUFFIXES = (".json", ".args", ".yaml")
"""Suffixes for output files in a folder.

The first suffix that stands for the stack's default format is used.
"""


@dataclass(frozen=True)
class Asked:
    """The request for a conversion: the output, the parts of the report to show, and further options of
    `bridge.api.convert.convert`.
    """

    to: str
    output: Path | None = None
    view: View = USUAL
    carry: bool = True
    dry_run: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def convert(job: Job, asked: Asked, gate: Gate = OPEN, names: Sequence[str] = ()) -> int:
    """Convert one file, or several into a folder. Returns the exit code."""
    job, several = gate.job(job), may_be_several(names)
    with answer(job):
        if several or gate.is_one_list:
            with progress.show_progress("the files", quiet=gate.is_one_list):
                return _convert_all(job, asked, gate, names if several else ())
        # Before any file is read: an output that cannot be written is said at once.
        SourceError.raise_if(
            obstacles(asked.output) if asked.output and str(asked.output) != STDIN else ()
        )
        with stay_within_limits():
            entry = _convert_file(job, asked, gate)
            _print_outcome(job, asked, entry)
        return entry.exit(job)


def _convert_file(job: Job, asked: Asked, gate: Gate) -> Looked:
    """Convert one file."""
    output = file_of(asked.output, "the sidecar (OUT.carry.json)" if asked.carry else "")
    if output is None and asked.dry_run:
        raise BridgeError("--dry-run: needs -o OUT; without -o nothing is written")
    words = {"to": asked.to, "carry": asked.carry, "dry_run": asked.dry_run, **asked.options}
    try:
        conversion = convert_source(job, output=output, **words)
    except TranslationError as error:
        if isinstance(error.part, Result) and not job.json:
            as_text.text(error.part, console(sys.stderr), asked.view)
        raise
    findings = gate.choice.of(conversion.findings, job.file)
    return Looked(job.file, conversion.result.source, findings, converted=conversion)


def _convert_all(job: Job, asked: Asked, gate: Gate, names: Sequence[str]) -> int:
    """Convert each file into the folder of -o; a note names those that no stack recognises. Returns the exit code."""
    if gate.is_one_list and (asked.output is None or str(asked.output) == STDIN):
        raise BridgeError(
            f"--format {gate.format}: needs -o OUT, as the findings go to standard output"
        )
    outputs = (
        _output_paths(asked, gate, names) if names else {job.file: (True, asked.output or Path())}
    )
    objects = list[Mapping[str, Any]]()

    def work(one: Job) -> Looked:
        here = replace(asked, output=outputs[one.file][1])
        with stay_within_limits():
            entry = _convert_file(one, here, gate)
            if job.json:
                objects.append({"file": one.file, **_outcome_object(job, here, entry)})
            elif not gate.is_one_list:
                say(f"{one.file} -> {here.output}")
                _print_outcome(job, here, entry)
        return entry

    def tell(entry: Looked) -> None:
        if entry.stranger:
            note(f"note: {entry.file}: left out, as no stack recognises it")
        elif entry.problems:
            rows = {"problems": [*entry.problems], "exit_code": Exit.ERROR}
            objects.append({"file": entry.file, **rows})
            if not job.json and not gate.is_one_list:
                complain(entry.complaints)

    files = [(file, named) for file, (named, _) in outputs.items()]
    every = look_at_files(replace(job, loose=bool(names)), files, work, tell)
    code = worst_code(one.exit(job) for one in every)
    if gate.is_one_list:
        print(FORMATS[gate.format]([row for one in every for row in one.records], code))
    elif job.json:
        print_json({"files": objects, "exit_code": code})
    else:
        say(summary_line(every, as_text.kind))
    return code


def _output_paths(asked: Asked, gate: Gate, names: Sequence[str]) -> dict[str, tuple[bool, Path]]:
    """Return for each file true if the user named it, and its output path in the folder of -o.

    Files that come from a folder or pattern have false.
    """
    # A pattern that fits nothing is said first: a folder for -o would not help.
    files, folder = files_of(names, gate), asked.output
    if folder is None or not (folder.is_dir() or (folder.parent.is_dir() and not folder.exists())):
        raise BridgeError(
            "convert: several files need -o FOLDER, a folder; it is made if the folder around it exists"
        )
    dialect = registry.load(asked.to)
    suffix = next(
        suffix for suffix in SUFFIXES if dialect.format_of(f"x{suffix}") == dialect.formats[0]
    )
    # The name of a file of a commit (git:REV:PATH) ends behind a colon, if PATH has no folder.
    stems = [
        Path(file.rpartition(":")[2] if file.startswith(GIT) else file).stem for file, _ in files
    ]
    outputs = [folder / (stem + suffix) for stem in stems]
    # a.json and a.yaml would both become a.args; neither may be lost.
    twice = {str(path) for path in outputs if outputs.count(path) > 1}
    BridgeError.raise_if(
        f"{path}: two of the files would be written to this path; convert them one by one"
        for path in sorted(twice)
    )
    if not asked.dry_run:
        _make_folder(folder)
    return {file: (named, path) for (file, named), path in zip(files, outputs, strict=True)}


def _make_folder(folder: Path) -> None:
    """Make the folder of -o if it is missing."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SourceError(
            f"{folder}: cannot be made ({(error.strerror or str(error)).lower()})"
        ) from None


def file_of(output: Path | None, beside: str) -> Path | None:
    """Return the file that -o names; None for standard output.

    In that case a note says that the files `beside` the output are not written.
    """
    if str(output) != STDIN:
        return output
    if beside:
        note(f"note: {beside} is not written, as the output is standard output; -o OUT writes both")
    return None


def _print_outcome(job: Job, asked: Asked, entry: Looked) -> None:
    conversion = entry.conversion
    if job.json:
        print_json(_outcome_object(job, asked, entry))
    elif not conversion.files:
        content(conversion.text)
        as_text.text(conversion.result, console(sys.stderr), asked.view, findings=entry.findings)
    else:
        shown = () if asked.dry_run else tuple(conversion.files)
        as_text.text(conversion.result, console(sys.stdout), asked.view, shown, entry.findings)
        for line in _dry_run_lines(asked, conversion):
            say(line)


def _outcome_object(job: Job, asked: Asked, entry: Looked) -> dict[str, Any]:
    """Return the report for programs."""
    conversion = entry.conversion
    written: dict[str, Any] = (
        {"files": list(map(str, conversion.files))} if conversion.files else {}
    )
    if asked.dry_run:
        written |= {"dry_run": True, "changes": _dry_run_lines(asked, conversion)}
    return {**as_json.as_json(conversion.result, job.threshold, entry.findings), **written}


def _dry_run_lines(asked: Asked, conversion: Converted) -> list[str]:
    """Return the lines that say what a dry run would change; empty for another run."""
    return [*differences(conversion.files, asked.output)] if asked.output and asked.dry_run else []
