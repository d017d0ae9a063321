"""Reads the file of a job: finds its stack and release, and has the dialect of that stack read it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from bridge import limits
from bridge.cli import missing_sizes
from bridge.cli.file_search import STDIN, limit_access
from bridge.cli.job import OPTIONS, Job
from bridge.cli.terminal import note
from bridge.errors import BridgeError, SourceError, UnrecognisedError, VersionError
from bridge.files import Document, Launch, Script, find, folder_of, parse, read_stream, read_text
from bridge.files.foreign import foreign
from bridge.files.secrets import keep_hidden
from bridge.stack import registry
from bridge.stack.dialect import Config, Dialect, Reader
from bridge.stack.findings import Finding
from bridge.stack.program_source import read_arguments_call
from bridge.stack.releases import unknown_release
from bridge.stack.stack_tables import StackTables
from bridge.translation.callers import add_caller


def answer_job(job: Job, work: Callable[[], int]) -> int:
    """Run `work` with access to the paths that the job's file may open; with --json an error is printed as an object too."""
    try:
        # A wrong --fail-on is said before anything is read or written.
        _ = job.threshold
        for fault in registry.faults():
            note(f"note: {fault}")
        with limit_access(job):
            return work()
    except BridgeError as error:
        error.as_object = job.json
        raise


def read_job(job: Job) -> Config:
    """The config in the job's file, as its stack and release would read it."""
    source = document_of(job)
    document, told = start_document(job, source)
    front_end = registry.find_front_end(source.data)
    alone = document is not source and not front_end
    # A launch leaves the sizes of the batch to its program.
    job = replace(job, open_auto=True) if (alone or front_end) and not job.auto else job
    dialect = dialect_of(job, document)
    version, said = release_of(job, dialect, job.version or registry.find_release(source.data))
    config = read_as(job, dialect, document, version)
    # Nobody wrote the program of a launch that stands for a config, and no such config has a schedule.
    rest = [one for one in config.remarks if not (alone and one.path in UNWRITTEN)]
    return replace(config, remarks=(*said, *told, *rest))


UNWRITTEN = ("train.py", "scheduler.type")
"""Paths of findings on what a launch has beside the config that it names."""


def start_document(job: Job, document: Document) -> tuple[Document, tuple[Finding, ...]]:
    """Return the document as its stack reads it, and findings of the host that starts it, if there is one: a
    host's config for a stack is read as the launch that names it, and so is a file that --auto-from gives it.
    """
    if job.launchers:
        return _launch_document(job, document)
    if front_end := registry.find_front_end(document.data):
        run: tuple[Document, tuple[Finding, ...]] = front_end.start(
            document, job.world_size, job.lenient
        )
        return run
    arguments: Any = job.settings_of_options.get("trainer", {})
    file = arguments.get(HOST_FILE)
    is_script = isinstance(document.data, Script)
    is_read = not is_script or any(registry.recognising(document.data)[0].values())
    if not is_read and not arguments:
        # The program names the file in a call, where no word of the launch does.
        document = replace(document, data=document.data.change(partial(_name_file, document)))
        is_read = any(registry.recognising(document.data)[0].values())
    if isinstance(file, str) and not is_read:
        # The Trainer takes the file by its argument, wherever that is said.
        named = place_of(file, arguments.places[HOST_FILE].source)
        inside = os.path.relpath(named, Path(document.name).parent)
        # A name that leads out of the script's folder would be looked for in the current one too.
        words = (f"--{HOST_FILE}", os.path.abspath(named) if inside.startswith("..") else inside)
        data = document.data.change(lambda launch: launch.with_words(words))
        document, is_read = replace(document, data=data), True
    host = registry.find_host(document.data) if job.dialect is None else None
    # A script of no stack's is the host's own, which says everything itself.
    if host is None or not is_read:
        return document, ()
    found: tuple[Document, tuple[Finding, ...]] = host.start(document, bool(arguments))
    if isinstance(file, str) and registry.find_launcher(document.data):
        place = place_of(file, arguments.places[HOST_FILE].source)
        return host.launch(document, place), found[1]
    return found


def _name_file(document: Document, launch: Launch) -> Launch:
    """Return a launch with the file of a stack that its program gives the Trainer in a call, if there is one."""
    call = read_arguments_call(launch, folder_of(document.name), (), (HOST_FILE,))
    said = call.values.get(HOST_FILE)
    name = said.value if said else None
    if not isinstance(name, str) or find(name, folder_of(document.name)) is None:
        return launch
    return launch.with_words((f"--{HOST_FILE}", name))


def place_of(name: str, source: str) -> str:
    """Return the path of a file that a source names: in the source's folder, else in the current one; in the first where
    it is in neither.
    """
    return str(find(name, Path(source).parent) or Path(source).parent / name)


def _launch_document(job: Job, document: Document) -> tuple[Document, tuple[Finding, ...]]:
    """Return the launch that the config of a host next to a DeepSpeed file stands for, and findings on that config."""
    name, *more = job.launchers
    starts = isinstance(document.data, Script) or registry.find_host(document.data)
    if more or starts or job.file == STDIN or not registry.score(HOST_FILE, document.data):
        others = f" and {', '.join(more)}" if more else ""
        raise BridgeError(
            f"--auto-from {name}{others}: found the config of a launcher, expected one at most, and next to a DeepSpeed"
            " file in a folder; name it in the script that starts the run (accelerate launch --config_file)"
        )
    config = parse(read_text(Path(name)), name, Path(name).suffix.lower())
    host = registry.find_launcher(config.data)
    _, found = host.start(config, True)
    placed = (
        replace(one, origin=replace(one.origin, file=one.origin.file or name))
        if one.origin
        else one
        for one in found
    )
    started: Document = host.launch(config, job.file)
    return started, tuple(placed)


HOST_FILE = "deepspeed"
"""The argument of Hugging Face's Trainer that names the file of a stack, and that stack."""


def release_of(
    job: Job, dialect: StackTables, version: str | None
) -> tuple[str | None, tuple[Finding, ...]]:
    """Return the release to use for `version`.

    With --nearest, an unknown release is replaced by the nearest known release, and a finding says
    so.
    """
    if version is None or version in dialect.versions:
        return version, ()
    near, said = dialect.nearest(version)
    if not job.nearest:
        raise VersionError(
            f"{dialect.name}: {unknown_release(version, dialect.versions)}; --nearest uses {near} instead"
        )
    return near, (said,)


def dialect_of(job: Job, document: Document) -> Dialect:
    """Return the dialect that --from names, else the dialect that recognises the document."""
    if not job.dialect:
        return recognise_dialect(document)
    dialect = registry.load(job.dialect)
    if said := registry.name_lookalike(dialect.name, document.data):
        raise SourceError(f"{document.name}: {said}")
    return dialect


def read_as(job: Job, dialect: Reader, document: Document, version: str | None) -> Config:
    """Return the config that `dialect` reads from the document for a release."""
    # Noted now, for the error that may follow when sizes do not match (bridge.cli.missing_sizes).
    if (
        dialect.coded
        and not job.code
        and job.file != STDIN
        and not isinstance(document.data, Script)
    ):
        missing_sizes.alone(Path(job.file))
    known = signature(dialect.read).parameters
    lent = {option.replace("_", "-") for option in job.lent}
    said = {
        word: value
        for word, value in job.settings_of_options.items()
        if word in known
        or not (job.loose or word == "open_auto" or OPTIONS.get(word, word) in lent)
    }
    strange = (OPTIONS.get(word, word) for word in said if word not in known)
    # Of one file this is a mistake. Of several (`loose`) the option is meant for those that can use it.
    BridgeError.raise_if(
        f"--{word}: {dialect.name} has no use for this option; drop it" for word in strange
    )
    return add_caller(
        dialect.read(document, version, job.world_size, job.lenient, **said), document
    )


def _resolve_release(document: Document, job: Job) -> Document:
    """Return the document.

    A shell script gets the environment and the launch that the options name.
    """
    if isinstance(document.data, Script):
        return replace(document, data=document.data.start_with(job.outside, job.launch))
    typed = [name for name in ("env", "launch") if getattr(job, name) and name not in job.lent]
    if typed and not job.loose:
        raise BridgeError(f"{document.name}: --env and --launch are for shell scripts; drop them")
    return document


def document_of(job: Job) -> Document:
    """Return the job's file as data; a script gets the environment that the user gives.

    From here on, secrets of the file are hidden in all output.
    """
    standard = job.file == STDIN
    name = "standard input" if standard else job.file
    text = text_of(job)
    # Before it is parsed: errors of the parser quote the text.
    keep_hidden(text[: limits.TEXT], job.outside)  # what is longer is refused unread
    document = _resolve_release(
        parse(text, name, "" if standard else Path(job.file).suffix.lower()), job
    )
    if isinstance(document.data, Script):
        keep_hidden("", document.data.variables_with_value)
    return document


def text_of(job: Job) -> str:
    """The text of the job's file."""
    if job.text is not None:
        return job.text
    return standard_input() if job.file == STDIN else read_text(Path(job.file))


def standard_input() -> str:
    """The text on standard input. Raises `SourceError` if it cannot be read."""
    if sys.stdin is None:  # closed by whoever started the command
        raise SourceError("standard input: closed; pipe the config in, or name its file")
    return read_stream(sys.stdin.buffer, "standard input")


def recognise_dialect(document: Document) -> Dialect:
    """The dialect that recognises `document` with the highest score; `SourceError` if none does, or
    if several share that score.
    """
    if said := foreign(document.data):
        raise UnrecognisedError(f"{document.name}: {said}")
    scores, faults = registry.recognising(document.data)
    if host := registry.find_host(document.data) if not any(scores.values()) else None:
        return registry.load(host.NAME)
    for fault in faults:
        note(f"note: {fault}")
    best = max(scores.values(), default=0)
    found = [name for name, score in scores.items() if score == best]
    doubts = _lookalike_kind(document)
    if doubts and set(found) <= doubts.keys():
        # Its own stack takes it for another kind of file: what that shares with a config is no sign of one.
        raise UnrecognisedError(f"{document.name}: {next(iter(doubts.values()))}")
    # A tie is refused rather than guessed: a file read as another stack's would lose settings without a word.
    if best == 0:
        script = document.data if isinstance(document.data, Script) else None
        seen = f" (runs of the script: {script.runs_text})" if script else ""
        lost = script.messages_on_missed if script else ()
        if doubts:
            raise UnrecognisedError(f"{document.name}: {next(iter(doubts.values()))}")
        named = " or ".join(registry.names())
        raise UnrecognisedError(
            f"{document.name}: no stack recognises it{seen}; name it with --from {named}", *lost
        )
    if len(found) > 1:  # of a stack and the program that calls it, the stack's reader reads both
        stacks = map(registry.load, found)
        calls = (one for one in stacks if {one.name, *one.callers} >= {*found})
        found = [one.name for one in calls if one.find_called(document)] or found
    if len(found) > 1:
        raise SourceError(
            f"{document.name}: could be for {' or '.join(found)}: it has settings of"
            f" {'both' if len(found) == 2 else 'all'}, and only one stack is read;"
            " name that stack with --from"
        )
    for said in doubts.values():
        note(f"note: {document.name}: read as {registry.load(found[0]).title}; it may be {said}")
    return registry.load(found[0])


def _lookalike_kind(document: Document) -> dict[str, str]:
    """Return the kind of file that the document is instead of a config.

    The result is a mapping from names of dialects to sentences. Dialects that do not know the kind
    are left out.
    """
    said = {name: registry.name_lookalike(name, document.data) for name in registry.OWN}
    return {name: text for name, text in said.items() if text}
