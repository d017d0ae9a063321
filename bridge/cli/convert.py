"""The commands `convert`, `check` and `diff`: read, recognise, translate, compare, report, write."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from bridge.cli import progress
from bridge.cli.budget import stay_within_limits
from bridge.cli.file_search import GIT, STDIN, at_hand, limit_access, may_be_several
from bridge.cli.job import Job
from bridge.cli.many_files import (
    OPEN,
    Gate,
    Looked,
    files_of,
    look_at_file,
    report_files,
    summary_line,
    worst_code,
)
from bridge.cli.project_settings import apply_project_settings
from bridge.cli.read_job import answer_job, read_job, text_of
from bridge.cli.sidecar import Sidecar
from bridge.cli.terminal import complain, console, content, note, print_json, say
from bridge.cli.translate_job import (
    Before,
    files_to_write,
    lock_job,
    sidecar_of,
    translate_job,
    write_in_format,
)
from bridge.cli.write_outputs import (
    STDOUT,
    differences,
    file_of,
    leave_no_sidecar,
    not_over_input,
    place_files,
    refuse_other,
)
from bridge.errors import BridgeError, SourceError, TranslationError, UnrecognisedError
from bridge.files import Original, as_private_as, obstacles, write_text
from bridge.files.progress import count_items
from bridge.files.secrets import HIDDEN
from bridge.plan.section import fields
from bridge.report import as_json, as_text
from bridge.report.exit_codes import Exit
from bridge.report.row_choice import USUAL, View
from bridge.report.sarif import FORMATS, Record, baseline, is_baseline, record, refusals
from bridge.stack import registry
from bridge.stack.dialect import Config
from bridge.stack.findings import DIFFERENCE, Finding
from bridge.stack.rules import How
from bridge.translation import sidecar as carry_over
from bridge.translation.diff import compare
from bridge.translation.launch_script import add_script
from bridge.translation.translate import Result


@dataclass(frozen=True)
class Asked:
    """The request for a conversion: the target stack and its release, the output, which further
    files to write, and the parts of the report to show.
    """

    to: str
    to_version: str | None = None
    output: Path | None = None
    strict: bool = False
    with_carry: bool = True
    script: bool = False
    force: bool = False
    dry_run: bool = False
    view: View = USUAL


SUFFIXES = (".json", ".args", ".yaml")
"""Suffixes for output files in a folder.

The first suffix that stands for the stack's default format is used.
"""


def convert(job: Job, asked: Asked, gate: Gate = OPEN, names: Sequence[str] = ()) -> int:
    """Convert one file, or several into a folder. Returns the exit code."""
    job = gate.job(job)
    if gate.is_one_list:
        return _convert_listed(job, asked, gate, names)
    if not may_be_several(names):
        # Before any file is read: an output that cannot be written is said at once.
        SourceError.raise_if(
            obstacles(asked.output) if asked.output and str(asked.output) != STDOUT else ()
        )
        return _convert_file(job, asked, gate, _print_outcome)
    with progress.show_progress("the files"):
        return answer_job(job, lambda: _convert_all(job, asked, gate, names))


def _output_paths(asked: Asked, gate: Gate, names: Sequence[str]) -> list[tuple[str, bool, Path]]:
    """Return each file, with true if the user named it, and its output path in the folder of -o.

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
    return [(file, named, output) for (file, named), output in zip(files, outputs, strict=True)]


Tell = Callable[[Job, Asked, Result, Mapping[Path, str], Sequence[Finding]], None]
"""What reports a conversion: it gets the texts of the files, by path, and the findings that count."""


def _make_folder(folder: Path) -> None:
    """Make the folder of -o if it is missing."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SourceError(
            f"{folder}: cannot be made ({(error.strerror or str(error)).lower()})"
        ) from None


def _convert_listed(job: Job, asked: Asked, gate: Gate, names: Sequence[str]) -> int:
    """Convert files, and print their findings as one list of records. Returns the exit code."""
    if asked.output is None or str(asked.output) == STDOUT:
        raise BridgeError(
            f"--format {gate.format}: needs -o OUT, as the findings go to standard output"
        )
    many = may_be_several(names)
    files = _output_paths(asked, gate, names) if many else [(job.file, True, asked.output)]
    records, codes = list[Record](), list[int]()

    def tell(
        job: Job, asked: Asked, result: Result, texts: object, told: Sequence[Finding]
    ) -> None:
        for one in told:
            # A default of the target belongs to no setting of the source, so its help is that of the target.
            side = result.config if one.how is How.DEFAULTED else result.source
            records.append(record(one, job.file, side.dialect.name))

    for file, named, output in count_items(files):
        one = apply_project_settings(replace(job, loose=job.loose or many), file)
        try:
            codes.append(_convert_file(one, replace(asked, output=output), gate, tell))
        except BridgeError as error:
            if not named and isinstance(error, UnrecognisedError):
                note(f"note: {file}: left out, as no stack recognises it")
                continue
            records += refusals(error.problems, file)
            codes.append(Exit.ERROR)
    code = worst_code(codes)
    print(FORMATS[gate.format](records, code))
    return code


def _convert_all(job: Job, asked: Asked, gate: Gate, names: Sequence[str]) -> int:
    """Convert each file into the folder of -o; a note names those that no stack recognises. Returns the exit code."""
    found, objects = list[Looked](), list[Mapping[str, Any]]()

    def tell(
        job: Job, asked: Asked, result: Result, texts: Mapping[Path, str], told: Sequence[Finding]
    ) -> None:
        found.append(Looked(job.file, result.source, tuple(told)))
        if job.json:
            objects.append({"file": job.file, **_outcome_object(job, asked, result, texts, told)})
        else:
            say(f"{job.file} -> {asked.output}")
            _print_outcome(job, asked, result, texts, told)

    for file, named, output in count_items(_output_paths(asked, gate, names)):
        one = apply_project_settings(replace(job, loose=True), file)
        try:
            _convert_file(one, replace(asked, output=output), gate, tell)
        except BridgeError as error:
            if not named and isinstance(error, UnrecognisedError):
                found.append(Looked(file, stranger=True))
                note(f"note: {file}: left out, as no stack recognises it")
                continue
            found.append(Looked(file, problems=error.problems))
            objects.append({"file": file, "problems": [*error.problems], "exit_code": Exit.ERROR})
            if not job.json:
                complain(found[-1].complaints)
    code = worst_code(one.exit(job) for one in found)
    if job.json:
        print_json({"files": objects, "exit_code": code})
    else:
        say(summary_line(found, as_text.kind))
    return code


def _convert_file(job: Job, asked: Asked, gate: Gate, tell: Tell) -> int:
    """Convert one file, and report it with `tell`. Returns the exit code."""
    output = file_of(asked.output, "the sidecar (OUT.carry.json)" if asked.with_carry else "")
    if output is None and asked.dry_run:
        raise BridgeError("--dry-run: needs -o OUT; without -o nothing is written")

    @stay_within_limits()
    def work() -> int:
        result, beside = _translate_file(job, asked, output)
        if asked.strict and not (result.exact and not beside.edited):
            _refuse_loss(result, job, beside, asked.view)
        result = replace(
            result,
            put=write_in_format(result, output, _content_before(result, beside))
            if output
            else None,
        )
        result = add_script(result, output) if asked.script else result
        texts = files_to_write(result, output, asked.with_carry) if output else {}
        not_over_input(job, texts)
        if output and not asked.dry_run:
            left = leave_no_sidecar(output, asked.force) if not asked.with_carry else None
            # Secrets may come from those files, so OUT is readable by no more people than they are.
            with as_private_as(*beside.sources):
                place_files(texts, output, asked.force, "--dry-run shows the changes")
            if left:
                left.unlink()
                note(f"note: {left} is removed, as it belongs to the file that was replaced")
        if output and result.put:
            # The command of the report is for the folder in which this one was typed.
            result = replace(result, put=result.put.below(output.parent))
        findings = gate.choice.of(as_json.remarks_of(result), job.file)
        tell(job, replace(asked, output=output), result, texts, findings)
        return as_json.exit_of(findings, job.threshold)

    return answer_job(job, work)


def _translate_file(job: Job, asked: Asked, output: Path | None) -> tuple[Result, Sidecar]:
    """Read and translate the job's file. Returns the result, and the sidecar that was read with the file."""
    target = registry.load(asked.to)
    with at_hand(job.file) as place:
        here = replace(job, file=place)
        # File and sidecar are one set: another run must not replace one of them between the two reads.
        with limit_access(here), lock_job(here):
            # Read once: the sidecar's digest, the config and the text that comes back are of the same bytes.
            here = replace(here, text=text_of(here))
            beside = sidecar_of(here, asked.with_carry)
            if said := beside.note(job.file, target, "--no-carry"):
                note(said)
            result = translate_job(here, target, asked.to_version, beside)
            carry = _carry_with_original(here, result, output)
    # The copy of a file of a commit is gone by now: nothing can be read from it on the way back.
    return replace(result, carry=carry if place == job.file else replace(carry, source="")), beside


def check(job: Job, view: View = USUAL, gate: Gate = OPEN, names: Sequence[str] = ()) -> int:
    """Check one file, or several. Returns the exit code."""
    job = gate.job(job)
    if gate.is_one_list or gate.write_baseline or may_be_several(names):
        return answer_job(job, lambda: _check_all(job, view, gate, names or (job.file,)))

    @stay_within_limits()
    def work() -> int:
        config = _read_named_file(job)
        findings = gate.choice.of(as_json.all_of(config), job.file)
        if job.json:
            print_json(as_json.check_json(config, job.threshold, findings))
        else:
            as_text.check_text(config, console(sys.stdout), view, findings, job.file_name)
        return as_json.exit_of(findings, job.threshold)

    return answer_job(job, work)


def _read_named_file(job: Job) -> Config:
    """Return the config of the job's file. Every error names the file, as the command may run in a
    loop over files or in a git hook, where nothing else names the file.
    """
    try:
        with at_hand(job.file) as place:
            return read_job(replace(job, file=place))
    except BridgeError as error:
        if job.file_name and not job.json:
            error.problems = tuple(
                # Options, and other files that this one names, are places of their own.
                one
                if one.startswith((job.file_name, "--")) or re.match(r"\S+: line \d", one)
                else f"{job.file_name}: {one}"
                for one in error.problems
            )
        raise


def _check_all(job: Job, view: View, gate: Gate, names: Sequence[str]) -> int:
    def reads(one: Job) -> tuple[Config, Sequence[Finding]]:
        with stay_within_limits():
            config = read_job(one)
            return config, as_json.all_of(config)

    def each(one: Looked) -> Mapping[str, Any]:
        if one.config is None:
            return {"problems": list(one.problems), "exit_code": Exit.ERROR}
        return as_json.check_json(one.config, job.threshold, one.findings)

    files = files_of(names, gate)
    _refuse_other_baseline(job, gate, (file for file, named in files if named))
    with progress.show_progress("the files"):
        found = [
            look_at_file(apply_project_settings(replace(job, loose=True), file), gate, named, reads)
            for file, named in count_items(files)
        ]
    return report_files(found, job, gate, view, each)


def _refuse_other_baseline(job: Job, gate: Gate, files: Iterable[str]) -> None:
    """Raise `SourceError` if --write-baseline names one of `files`, or a file that is not a baseline."""
    if gate.write_baseline:
        for file in files:
            not_over_input(replace(job, file=file), [gate.write_baseline])
        refuse_other(gate.write_baseline, "a baseline", is_baseline)


def diff(job: Job, other: str, view: View = USUAL, gate: Gate = OPEN) -> int:
    """Compare the meanings of two files. Returns the exit code."""
    job, names = gate.job(job), (job.file, other)

    @stay_within_limits()
    def work() -> int:
        _refuse_other_baseline(job, gate, names)
        one, two = _read_sides(job, names)
        findings = gate.choice.of(compare(one, two), other)
        code = as_json.exit_of(findings, job.threshold)
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
            print_json(as_json.difference_json(names, (one, two), findings, code))
        else:
            as_text.print_differences(names, (one, two), findings, console(sys.stdout), view)
        return code

    return answer_job(job, work)


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


def _read_sides(job: Job, names: Sequence[str]) -> tuple[Config, Config]:
    """Return both configs. If only one file states a number of ranks, the other file is read for that number too."""
    jobs = [apply_project_settings(job, name) for name in names]
    # Standard input can be read only once, and a side may be read twice.
    jobs = [replace(one, text=text_of(one)) if one.file == STDIN else one for one in jobs]
    sides = [_read_side(one) for one in jobs]
    stated = [side.world_size for side in sides]
    if all(stated) or not any(stated):
        return sides[0], sides[1]
    open_ = stated.index(None)
    ranks = stated[1 - open_]
    shown = ["standard input" if name == STDIN else name for name in names]
    note(
        f"{shown[open_]} does not state a number of ranks: read for {ranks} ranks, the number in {shown[1 - open_]}"
    )
    sides[open_] = _read_side(replace(jobs[open_], world_size=ranks))
    return sides[0], sides[1]


def _read_side(job: Job) -> Config:
    with at_hand(job.file) as place:
        here = replace(job, file=place)
        try:
            with limit_access(here):
                config = read_job(here)
                # What the stack derives may read further files; that is allowed within this block alone.
                _ = config.effective
        except BridgeError as error:
            # There are two files, so a line alone does not tell which one is meant.
            named = (
                problem if problem.startswith((job.file, place)) else f"{job.file}: {problem}"
                for problem in error.problems
            )
            found = type(error)(*named)
            found.words = error.words
            raise found from None
    return config


def _carry_with_original(job: Job, result: Result, output: Path | None) -> carry_over.Carry:
    """Return the carry-over. Its `secrets` are the values that the sidecar must not contain.

    The carry-over includes the text of the job's file if the dialect can write values back into such a text.
    """
    if job.file == STDIN:
        return replace(result.carry, secrets=HIDDEN)
    original = Original(text_of(job), Path(job.file).suffix.lower(), job.outside, job.launch)
    rewritable = original.document.format in result.source.dialect.rewrites
    source, folder = os.path.realpath(job.file), os.path.realpath((output or Path(job.file)).parent)
    # Relative if the source lies below the output, so that the folder can be moved as a whole.
    near = os.path.relpath(source, folder) if Path(source).is_relative_to(folder) else source
    return replace(
        result.carry,
        original=original if rewritable else None,
        secrets=original.secrets,
        source=near,
    )


def _content_before(result: Result, beside: Sidecar) -> Before | None:
    """Return the text that the target was originally read from.

    If source and target are of one stack, this is the job's file; else it is the text in the
    sidecar.
    """
    if result.source.dialect.name == result.config.dialect.name:
        return (result.carry.original, result.source.version) if result.carry.original else None
    carry = beside.fitting(result.config.dialect)
    return (carry.original, carry.version) if carry and carry.original else None


def _refuse_loss(result: Result, job: Job, beside: Sidecar, view: View) -> None:
    if not job.json:
        as_text.text(result, console(sys.stderr), view)
    lost = [finding for finding in result.findings if finding.matters]
    odd = [finding for finding in beside.findings if beside.edited and finding not in lost]
    problems = (
        f"{finding.path}: {f'{finding.how}: ' if finding.how else ''}{finding.message}"
        for finding in (*odd, *lost)
    )
    raise TranslationError(
        *problems, "strict: nothing was written; drop --strict to accept the loss"
    )


def _print_outcome(
    job: Job, asked: Asked, result: Result, texts: Mapping[Path, str], told: Sequence[Finding]
) -> None:
    if job.json:
        print_json(_outcome_object(job, asked, result, texts, told))
    elif asked.output:
        shown = () if asked.dry_run else tuple(texts)
        as_text.text(result, console(sys.stdout), asked.view, shown, told)
        for line in _dry_run_lines(asked, texts):
            say(line)
    else:
        content(result.written.text)
        as_text.text(result, console(sys.stderr), asked.view, findings=told)


def _outcome_object(
    job: Job, asked: Asked, result: Result, texts: Mapping[Path, str], told: Sequence[Finding]
) -> dict[str, Any]:
    """Return the report for programs."""
    written: dict[str, Any] = {"files": list(map(str, texts))} if texts else {}
    if asked.dry_run:
        written |= {"dry_run": True, "changes": _dry_run_lines(asked, texts)}
    return {**as_json.as_json(result, job.threshold, told), **written}


def _dry_run_lines(asked: Asked, texts: Mapping[Path, str]) -> list[str]:
    """Return the lines that say what a dry run would change; empty for another run."""
    return [*differences(texts, asked.output)] if asked.output and asked.dry_run else []
