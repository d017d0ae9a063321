"""What `convert` and `check` do: read, recognise, translate, report, write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compat
from bridge import carry as carry_over
from bridge import report
from bridge.config import nest
from bridge.dialect import Config, Dialect
from bridge.errors import BridgeError, SourceError, TranslationError
from bridge.files import Document, Original, Script, load, parse, read_stream, read_text, scalar, write_all
from bridge.translation import Result, translate

if TYPE_CHECKING:
    from rich.console import Console

STDIN = "-"
PIPE_WIDTH = 120
"""Columns of a report that does not go to a terminal."""


@dataclass(frozen=True)
class Job:
    """What is to be read, and how."""

    file: str
    dialect: str | None
    version: str | None
    world_size: int | None
    lenient: bool
    json: bool
    auto: Sequence[str] = ()
    code: Sequence[str] = ()
    env: Sequence[str] = ()
    launch: int | None = None

    @property
    def said(self) -> dict[str, dict[str, Any]]:
        """What was said beside the file, by keyword of a dialect's `read`."""
        said = {"auto": _named(self.auto, "--auto"), "code": _nested(_named(self.code, "--code"))}
        return {keyword: values for keyword, values in said.items() if values}


def convert(job: Job, to: str, to_version: str | None, output: Path | None, strict: bool, with_carry: bool) -> int:
    """Convert one file; the exit code."""

    def work() -> int:
        if with_carry and (carry := _carry_of(job)):
            print(_note(job, carry), file=sys.stderr)
        result = translated(job, compat.load(to), to_version, with_carry)
        result = replace(result, carry=replace(result.carry, original=_original(job, result)))
        if strict and not result.exact:
            _refuse(result, job)
        texts = files(result, output, with_carry, _before(job, result, with_carry)) if output else {}
        not_over_input(job, texts)
        write_all(texts)
        _say(result, job, output)
        return report.exit_code(result)

    return answered(job, work)


def check(job: Job) -> int:
    """Check one file; the exit code."""

    def work() -> int:
        config = read(job)
        if job.json:
            print_json(report.check_json(config))
        else:
            report.check_text(config, console(sys.stdout))
        return report.check_code(config)

    return answered(job, work)


def answered(job: Job, work: Callable[[], int]) -> int:
    """Run `work`; with --json an error is an object on stdout as well."""
    try:
        return work()
    except BridgeError as error:
        if job.json:
            print_json({"problems": list(error.problems), "exit_code": report.ERROR})
        raise


# Reading


def read(job: Job) -> Config:
    """The config in the job's file, as its stack and release would read it."""
    document = document_of(job)
    return read_as(job, dialect_of(job, document), document, job.version)


def dialect_of(job: Job, document: Document) -> Dialect:
    """The dialect that was named, else the one that recognises the document."""
    return compat.load(job.dialect) if job.dialect else recognised(document)


def read_as(job: Job, dialect: Dialect, document: Document, version: str | None) -> Config:
    """The document as `dialect` would read it at a release."""
    known = signature(dialect.read).parameters
    BridgeError.raise_if(f"--{word}: {dialect.name} has nothing to say there; drop it" for word in job.said if word not in known)
    return dialect.read(document, version, job.world_size, job.lenient, **job.said)


def _started(document: Document, job: Job) -> Document:
    """A script as the user starts it; nothing else has an environment."""
    if isinstance(document.data, Script):
        return replace(document, data=document.data.told(_outside(job), job.launch))
    if job.env or job.launch:
        raise BridgeError(f"{document.name}: --env and --launch are for shell scripts; drop them")
    return document


def _outside(job: Job) -> dict[str, str]:
    """What a script is started with."""
    return dict(_pair(pair, "--env") for pair in job.env)


def _pair(pair: str, option: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    BridgeError.raise_if([f"{option} {pair}: expected NAME=VALUE"] if not equals else [])
    return name, value


def _named(pairs: Sequence[str], option: str) -> dict[str, Any]:
    return {name: scalar(value) for name, value in (_pair(pair, option) for pair in pairs)}


def _nested(said: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as sections."""
    BridgeError.raise_if(
        f"--code {name}: found a value and parts of it ({part}); keep one of them"
        for name in said
        for part in said
        if part.startswith(name + ".")
    )
    return nest(said)


def document_of(job: Job) -> Document:
    """The job's file as data; a script as the user starts it."""
    standard = job.file == STDIN
    found = parse(read_stream(sys.stdin.buffer, "standard input"), "standard input") if standard else load(Path(job.file))
    return _started(found, job)


def recognised(document: Document) -> Dialect:
    """The dialect that is surest of `document`; `SourceError` if none or more than one is."""
    scores = {name: compat.load(name).recognises(document.data) for name in compat.names()}
    best = max(scores.values(), default=0)
    found = [name for name, score in scores.items() if score == best]
    if best == 0:
        seen = f" (the runs that it starts: {document.data.seen})" if isinstance(document.data, Script) else ""
        raise SourceError(f"{document.name}: no stack recognises it{seen}; name it with --from {' or '.join(scores)}")
    if len(found) > 1:
        raise SourceError(f"{document.name}: could be for {' or '.join(found)}; name it with --from")
    return compat.load(found[0])


def translated(job: Job, target: Dialect, version: str | None, with_carry: bool) -> Result:
    """The job's file in another dialect, with what an earlier conversion left beside the file."""
    carry = _carry_of(job) if with_carry else None
    fitting = carry if carry and carry.dialect == target.name else None
    return translate(read(job), target, version, job.world_size, fitting)


def _note(job: Job, carry: carry_over.Carry) -> str:
    edited = carry.digest != carry_over.digest_of(read_text(job.file))
    edits = f"; {job.file} was edited since, and edits win" if edited else ""
    return f"note: reads {carry_over.beside(Path(job.file))} as well{edits}; --no-carry leaves it out"


def _carry_of(job: Job) -> carry_over.Carry | None:
    return carry_over.find(Path(job.file)) if job.file != STDIN else None


# Writing

Before = tuple[Original, str]
"""A text that the target was once read from, and the release that it was for."""


def _original(job: Job, result: Result) -> Original | None:
    """The text of the job's file, where its dialect can write into it again."""
    if job.file == STDIN or not result.source.dialect.rewrites:
        return None
    original = Original(read_text(job.file), Path(job.file).suffix.lower(), _outside(job), job.launch)
    return original if original.document.format in result.source.dialect.rewrites else None


def _before(job: Job, result: Result, with_carry: bool) -> Before | None:
    """What the target was read from: the file itself in another release, else what the sidecar tells."""
    if result.source.dialect.name == result.config.dialect.name:
        return (result.carry.original, result.source.version) if result.carry.original else None
    carry = _carry_of(job) if with_carry else None
    fits = carry is not None and carry.dialect == result.config.dialect.name
    return (carry.original, carry.version) if carry and fits and carry.original else None


def files(result: Result, output: Path, with_carry: bool, before: Before | None = None) -> dict[Path, str]:
    """What is written: the target in the format that the suffix of `output` stands for, and what lies beside it.

    What was once read from the text `before` is written into it.
    """
    dialect = result.config.dialect
    written = dialect.rewritten(result.config, *before, output) if before else None
    written = written or dialect.render(result.config, dialect.format_of(output))
    carried = {carry_over.beside(output): result.carry.text(written.text)} if with_carry else {}
    return {**dialect.files(written, output), **carried}


def not_over_input(job: Job, texts: Mapping[Path, str]) -> None:
    """Refuse to write over the file that is read."""
    for path in texts:
        with suppress(OSError):
            if job.file != STDIN and path.samefile(job.file):
                raise SourceError(f"{path}: is the file that is converted; name another output")


def _refuse(result: Result, job: Job) -> None:
    if not job.json:
        report.text(result, console(sys.stderr))
    lost = [finding for finding in result.findings if finding.matters]
    problems = (f"{finding.path}: {finding.how}: {finding.message}" for finding in lost)
    raise TranslationError(*problems, "strict: nothing was written; drop --strict to accept the loss")


def _say(result: Result, job: Job, output: Path | None) -> None:
    if job.json:
        print_json(report.as_json(result))
    elif output:
        report.text(result, console(sys.stdout))
    else:
        sys.stdout.write(result.written.text)
        sys.stdout.flush()
        report.text(result, console(sys.stderr))


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(content, indent=2, allow_nan=False))


def console(stream: Any) -> Console:
    """A console on `stream`: colour and the terminal's width on a terminal, neither in a pipe."""
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)
