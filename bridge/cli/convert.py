"""What `convert` and `check` do: read, recognise, translate, report, write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from bridge import carry as carry_over
from bridge import limits, printed, report, stacks
from bridge.cli import sidecar
from bridge.cli.budget import bounded
from bridge.cli.job import OPTIONS, Job
from bridge.cli.placing import differences, refuse_edited
from bridge.cli.sidecar import Sidecar
from bridge.cli.terminal import console, content, note, print_json, say
from bridge.dialect import Config, Dialect, Written
from bridge.errors import BridgeError, SourceError, TranslationError, VersionError
from bridge.exits import Exit
from bridge.files import (
    Document,
    Original,
    Script,
    as_private_as,
    parse,
    reaching,
    read_stream,
    read_text,
    write_all,
)
from bridge.files.lock import shared
from bridge.files.read import LOADERS
from bridge.findings import Finding
from bridge.programs import scripted
from bridge.releases import unknown_release
from bridge.secrets import HIDDEN, keep_hidden
from bridge.translation import Result, translate
from bridge.view import USUAL, View

STDIN = STDOUT = "-"


@dataclass(frozen=True)
class Asked:
    """What a conversion is to do: the stack and release, where to write, what beside it, and what of the report is shown."""

    to: str
    to_version: str | None = None
    output: Path | None = None
    strict: bool = False
    with_carry: bool = True
    script: bool = False
    force: bool = False
    dry_run: bool = False
    view: View = USUAL


def convert(job: Job, asked: Asked) -> int:
    """Convert one file; the exit code."""
    output = file_of(asked.output, "the sidecar (OUT.carry.json)" if asked.with_carry else "")
    if output is None and asked.dry_run:
        raise BridgeError("--dry-run: needs -o OUT; without it nothing is written")

    @bounded()
    def work() -> int:
        target = stacks.load(asked.to)
        with together(job):
            beside = sidecar_of(job, asked.with_carry)
            if said := beside.note(job.file, target):
                note(said)
            result = translated(job, target, asked.to_version, beside)
            result = replace(result, carry=_kept(job, result, output))
        if asked.strict and not (result.exact and not beside.edited):
            _refuse(result, job, beside)
        result = replace(result, put=written_for(result, output, _before(result, beside)) if output else None)
        result = scripted(result, output) if asked.script else result
        texts = files(result, output, asked.with_carry) if output else {}
        not_over_input(job, texts)
        if output and not asked.dry_run:
            with as_private_as(*beside.sources):
                placed(texts, output, asked.force)
        _say(result, job, replace(asked, output=output), texts)
        return report.exit_of(report.remarks_of(result), job.threshold)

    return answered(job, work)


def placed(texts: Mapping[Path, str], output: Path, force: bool) -> None:
    """Write all files or none; one that was edited is written over only by `force`."""
    if not force:
        refuse_edited(texts, output)
    write_all(texts, texts.keys() - {output})


def check(job: Job, view: View = USUAL) -> int:
    """Check one file; the exit code."""

    @bounded()
    def work() -> int:
        config = read(job)
        if job.json:
            print_json(report.check_json(config, job.threshold))
        else:
            printed.check_text(config, console(sys.stdout), view)
        return report.exit_of(report.all_of(config), job.threshold)

    return answered(job, work)


def answered(job: Job, work: Callable[[], int]) -> int:
    """Run `work` within what the job's file may reach; with --json an error is an object on stdout as well."""
    try:
        _ = job.threshold
        for fault in stacks.faults():
            note(f"note: {fault}")
        with within(job):
            return work()
    except BridgeError as error:
        if job.json:
            print_json({"problems": list(error.problems), "exit_code": Exit.ERROR})
        raise


@contextmanager
def within(job: Job) -> Iterator[None]:
    """What the job's file names is opened only in its folder or where --allow-path says, and nothing is written wider than it."""
    standard = job.file == STDIN
    with reaching(Path() if standard else Path(job.file).parent, job.allow), as_private_as(None if standard else job.file):
        yield


# Reading


def read(job: Job) -> Config:
    """The config in the job's file, as its stack and release would read it."""
    document = document_of(job)
    dialect = dialect_of(job, document)
    version, said = release_of(job, dialect, job.version)
    config = read_as(job, dialect, document, version)
    return replace(config, remarks=(*said, *config.remarks)) if said else config


def release_of(job: Job, dialect: Dialect, version: str | None) -> tuple[str | None, tuple[Finding, ...]]:
    """The release to take for `version`: with --nearest an unknown one is taken as its neighbour, and a finding says so."""
    if version is None or version in dialect.versions:
        return version, ()
    near, said = dialect.nearest(version)
    if not job.nearest:
        raise VersionError(f"{dialect.name}: {unknown_release(version, dialect.versions)}; --nearest takes it as {near}")
    return near, (said,)


def dialect_of(job: Job, document: Document) -> Dialect:
    """The dialect that was named, else the one that recognises the document."""
    return stacks.load(job.dialect) if job.dialect else recognised(document)


def read_as(job: Job, dialect: Dialect, document: Document, version: str | None) -> Config:
    """The document as `dialect` would read it at a release."""
    known = signature(dialect.read).parameters
    strange = (OPTIONS.get(word, word) for word in job.said if word not in known)
    BridgeError.raise_if(f"--{word}: {dialect.name} has nothing to say there; drop it" for word in strange)
    return dialect.read(document, version, job.world_size, job.lenient, **job.said)


def _started(document: Document, job: Job) -> Document:
    """A script as the user starts it; nothing else has an environment."""
    if isinstance(document.data, Script):
        return replace(document, data=document.data.told(job.outside, job.launch))
    if job.env or job.launch:
        raise BridgeError(f"{document.name}: --env and --launch are for shell scripts; drop them")
    return document


def document_of(job: Job) -> Document:
    """The job's file as data; a script as the user starts it. From here on nothing that is printed holds its secrets."""
    standard = job.file == STDIN
    name = "standard input" if standard else job.file
    text = standard_input() if standard else read_text(Path(job.file))
    keep_hidden(text[: limits.TEXT], job.outside)  # what is longer is refused unread
    document = _started(parse(text, name, "" if standard else Path(job.file).suffix.lower()), job)
    if isinstance(document.data, Script):
        keep_hidden("", document.data.named)
    return document


def standard_input() -> str:
    """What is piped in. Raises `SourceError`."""
    if sys.stdin is None:  # closed by whoever started the command
        raise SourceError("standard input: closed; pipe the config in, or name its file")
    return read_stream(sys.stdin.buffer, "standard input")


def recognised(document: Document) -> Dialect:
    """The dialect that is surest of `document`; `SourceError` if none or more than one is."""
    scores, faults = stacks.recognising(document.data)
    for fault in faults:
        note(f"note: {fault}")
    best = max(scores.values(), default=0)
    found = [name for name, score in scores.items() if score == best]
    if best == 0:
        script = document.data if isinstance(document.data, Script) else None
        seen = f" (the runs that it starts: {script.seen})" if script else ""
        lost = script.lost if script else ()
        named = " or ".join(stacks.names())
        raise SourceError(f"{document.name}: no stack recognises it{seen}; name it with --from {named}", *lost)
    if len(found) > 1:
        raise SourceError(f"{document.name}: could be for {' or '.join(found)}; name it with --from")
    return stacks.load(found[0])


def translated(job: Job, target: Dialect, version: str | None, beside: Sidecar) -> Result:
    """The job's file in another dialect, with what an earlier conversion left beside the file."""
    carry = beside.fitting(target)
    config = _sized(job, read(job), carry) if carry else read(job)
    near, said = release_of(job, target, version)
    result = translate(config, target, near, config.world_size if carry else job.world_size, carry)
    return replace(result, findings=(*said, *beside.remarks(target, Path(job.file)), *result.findings))


def _sized(job: Job, config: Config, carry: carry_over.Carry) -> Config:
    """`config` on as many ranks as the source of its sidecar, where nothing else tells how many there are and they fit."""
    if config.world_size or not carry.world_size:
        return config
    try:
        sized = read(replace(job, world_size=carry.world_size))
    except BridgeError:
        return config
    note(f"note: on {carry.world_size} ranks, as the sidecar says; --world-size says how many they are now")
    return sized


def sidecar_of(job: Job, wanted: bool = True) -> Sidecar:
    """What lies beside the job's file."""
    return sidecar.beside(Path(job.file)) if wanted and job.file != STDIN else Sidecar()


@contextmanager
def together(job: Job) -> Iterator[None]:
    """Within this block no other run writes the job's file and what lies beside it."""
    with shared(Path() if job.file == STDIN else Path(job.file).parent):
        yield


# Writing

Before = tuple[Original, str]
"""A text that the target was once read from, and the release that it was for."""


def _kept(job: Job, result: Result, output: Path | None) -> carry_over.Carry:
    """The carry-over with the text of the job's file, where its dialect can write into it again, and with what to leave out."""
    if job.file == STDIN:
        return replace(result.carry, secrets=HIDDEN)
    original = Original(read_text(job.file), Path(job.file).suffix.lower(), job.outside, job.launch)
    rewritable = original.document.format in result.source.dialect.rewrites
    source, folder = os.path.realpath(job.file), os.path.realpath((output or Path(job.file)).parent)
    near = os.path.relpath(source, folder) if Path(source).is_relative_to(folder) else source
    return replace(result.carry, original=original if rewritable else None, secrets=original.secrets, source=near)


def _before(result: Result, beside: Sidecar) -> Before | None:
    """What the target was read from: the file itself in another release, else what the sidecar tells."""
    if result.source.dialect.name == result.config.dialect.name:
        return (result.carry.original, result.source.version) if result.carry.original else None
    carry = beside.fitting(result.config.dialect)
    return (carry.original, carry.version) if carry and carry.original else None


def written_for(result: Result, output: Path, before: Before | None = None) -> Written:
    """The target in the format that the suffix of `output` stands for; what was once read from `before` is written into it."""
    dialect = result.config.dialect
    written = dialect.rewritten(result.config, *before, output) if before else None
    return (written or dialect.render(result.config, format_for(dialect, output))).named(output.name)


def files(result: Result, output: Path, with_carry: bool) -> dict[Path, str]:
    """What is written: the target, and what lies beside it."""
    written = result.put or written_for(result, output)
    texts = result.config.dialect.files(written, output)
    others = {path.name: text for path, text in texts.items() if path != output}
    carried = {carry_over.beside(output): result.carry.text(written.text, others)} if with_carry else {}
    return {**texts, **carried}


def file_of(output: Path | None, beside: str) -> Path | None:
    """The file that -o names; None is standard output, and what would lie `beside` a file is said not to be written."""
    if str(output) != STDOUT:
        return output
    if beside:
        note(f"note: {beside} is not written beside standard output; -o OUT writes both")
    return None


def format_for(dialect: Dialect, output: Path) -> str | None:
    """The format that the suffix of `output` stands for; refused if a reader would take the file for something else."""
    format, suffix = dialect.format_of(output), output.suffix.lower()
    if format is None and suffix in LOADERS:
        fitting = " or ".join(suffix for suffix in LOADERS if dialect.format_of(f"x{suffix}"))
        raise SourceError(f"{output}: found {suffix}, which {dialect.title} is not written as; name a file {fitting}")
    return format


def not_over_input(job: Job, texts: Iterable[Path]) -> None:
    """Refuse to write over the file that is read."""
    for path in texts:
        with suppress(OSError):
            if job.file != STDIN and path.samefile(job.file):
                raise SourceError(f"{path}: is the file that is converted; name another output")


def _refuse(result: Result, job: Job, beside: Sidecar) -> None:
    if not job.json:
        printed.text(result, console(sys.stderr))
    lost = [finding for finding in result.findings if finding.matters]
    odd = [finding for finding in beside.findings if beside.edited and finding not in lost]
    problems = (f"{finding.path}: {f'{finding.how}: ' if finding.how else ''}{finding.message}" for finding in (*odd, *lost))
    raise TranslationError(*problems, "strict: nothing was written; drop --strict to accept the loss")


def _say(result: Result, job: Job, asked: Asked, texts: Mapping[Path, str]) -> None:
    changes = [*differences(texts, asked.output)] if asked.output and asked.dry_run else []
    if job.json:
        print_json({**report.as_json(result, job.threshold), **_files(texts, changes if asked.dry_run else None)})
    elif asked.output:
        printed.text(result, console(sys.stdout), asked.view, () if asked.dry_run else tuple(texts))
        for line in changes:
            say(line)
    else:
        content(result.written.text)
        printed.text(result, console(sys.stderr), asked.view)


def _files(texts: Iterable[Path], changes: Sequence[str] | None) -> dict[str, Any]:
    """What was written, or would be."""
    files = {"files": list(map(str, texts))} if texts else {}
    return files if changes is None else {**files, "dry_run": True, "changes": list(changes)}
