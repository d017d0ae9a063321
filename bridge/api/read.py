"""Reads the file of a source: finds its stack and release, and has the dialect of that stack read it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, Unpack

from bridge import limits
from bridge.api.access import note_file, open_source, place_source
from bridge.api.option_values import HOST_FILE
from bridge.api.source import STDIN, Options, Readable, Source, source_of
from bridge.errors import BridgeError, SourceError, UnrecognisedError, VersionError, nearest
from bridge.files import (
    Document,
    Launch,
    Script,
    find,
    folder_of,
    load,
    parse,
    read_stream,
    read_text,
)
from bridge.files.foreign import foreign
from bridge.files.notes import note
from bridge.files.secrets import keep_hidden
from bridge.files.shown import brief
from bridge.plan.model import Model
from bridge.plan.plan import Plan
from bridge.stack import registry
from bridge.stack.dialect import Config, Dialect, Reader
from bridge.stack.findings import Finding
from bridge.stack.program_source import read_arguments_call
from bridge.stack.releases import unknown_release
from bridge.stack.stack_tables import StackTables
from bridge.translation.callers import add_caller
from bridge.translation.lift import lift

OPTIONS = {"trainer": "auto-from"}
"""Names of options, by the argument of `Dialect.read` that they set, where the two names differ."""


@dataclass(frozen=True)
class Read:
    """A config as its stack would read it, and the notes that were made on the way."""

    config: Config
    notes: tuple[str, ...] = ()

    @cached_property
    def plan(self) -> Plan:
        """What the run means, in words that all stacks share."""
        return lift(self.config)


def read(readable: Readable, /, **options: Unpack[Options]) -> Read:
    """Read a config as its stack and release would.

    Raises `BridgeError` with every problem, for what no stack recognises or the stack would refuse.
    """
    source = source_of(readable, options)
    with open_source(source) as notes, place_source(source) as here:
        return Read(read_config(here), tuple(notes))


def read_config(source: Source) -> Config:
    """The config in the source's file, as its stack and release would read it."""
    written = document_of(source)
    document, told = start_document(source, written)
    front_end = registry.find_front_end(written.data)
    alone = document is not written and not front_end
    # A launch leaves the sizes of the batch to its program.
    source = replace(source, open_auto=True) if (alone or front_end) and not source.auto else source
    dialect = dialect_of(source, document)
    version, said = release_of(
        source, dialect, source.version or registry.find_release(written.data)
    )
    config = read_as(source, dialect, document, version)
    # Nobody wrote the program of a launch that stands for a config, and no such config has a schedule.
    rest = [one for one in config.remarks if not (alone and one.path in UNWRITTEN)]
    return replace(config, remarks=(*said, *told, *rest))


UNWRITTEN = ("train.py", "scheduler.type")
"""Paths of findings on what a launch has beside the config that it names."""


def start_document(source: Source, document: Document) -> tuple[Document, tuple[Finding, ...]]:
    """Return the document as its stack reads it, and findings of the host that starts it, if there is one: a
    host's config for a stack is read as the launch that names it, and so is a file that `auto_from` gives it.
    """
    if source.launchers:
        return _launch_document(source, document)
    document = _join_flags(source, document)
    if front_end := registry.find_front_end(document.data):
        options: dict[str, Any] = {"lenient": source.lenient}
        if front_end.RELEASE:
            stack = registry.load(front_end.__package__.rpartition(".")[2])
            options["version"] = release_of(source, stack, source.version)[0]
        run: tuple[Document, tuple[Finding, ...]] = front_end.start(
            document, source.world_size, **options
        )
        return run
    arguments: Any = source.settings_of_options.get("trainer", {})
    file = arguments.get(HOST_FILE)
    is_script = isinstance(document.data, Script)
    is_read = not is_script or any(registry.recognising(document.data)[0].values())
    if is_script and file is None:
        # The program's call names the file, which wins over one that the launch names.
        script = document.data.change(partial(_name_file, document, is_read))
        # A script whose programs name none stays the user's own document.
        if script.launches != document.data.launches:
            document = replace(document, data=script)
        is_read = any(registry.recognising(document.data)[0].values())
    if isinstance(file, str) and not is_read:
        # The Trainer takes the file by its argument, wherever that is said.
        named = place_of(file, arguments.places[HOST_FILE].source)
        inside = os.path.relpath(named, Path(document.name).parent)
        # A name that leads out of the script's folder would be looked for in the current one too.
        words = (f"--{HOST_FILE}", os.path.abspath(named) if inside.startswith("..") else inside)
        data = document.data.change(lambda launch: launch.with_words(words))
        document, is_read = replace(document, data=data), True
    host = registry.find_host(document.data) if source.dialect is None else None
    # A script of no stack's is the host's own, which says everything itself.
    if host is None or not is_read:
        return document, ()
    found: tuple[Document, tuple[Finding, ...]] = host.start(document, bool(arguments))
    if isinstance(file, str) and registry.find_launcher(document.data):
        place = place_of(file, arguments.places[HOST_FILE].source)
        return host.launch(document, place), found[1]
    return found


def _join_flags(source: Source, document: Document) -> Document:
    """Return the launch of flags and the config of the stack that their program starts, where both are given, or flags
    that name such a config; any other document as it is.
    """
    if not isinstance(document.data, list):
        BridgeError.raise_if(
            f"--with {name}: found next to {source.file}, expected arguments of Hugging Face's Trainer; for a run of"
            f" Megatron-DeepSpeed, name the file of its flags first, and its DeepSpeed file with --with"
            for name in source.parts
        )
        return document
    file, *more = (*source.parts, "")
    if more[1:] or (file and isinstance(load(Path(file)).data, list)):
        raise BridgeError(
            f"--with {' '.join(source.parts)}: found next to the flags of {source.file}, expected one DeepSpeed file"
        )
    return registry.load(HOST_FILE).join_flags(document, file) or document


def _name_file(document: Document, is_read: bool, launch: Launch) -> Launch:
    """Return a launch with the file of a stack that its program gives the Trainer in a call, if there is one.

    Raises `BridgeError` if the call gives no such file and a stack would take another file, as `is_read` says.
    """
    option = f"--{HOST_FILE}"
    own = [text.partition("=")[0] for text in launch.texts]
    flags = (HOST_FILE,) if option in own else ()
    call = read_arguments_call(launch, folder_of(document.name), flags, (HOST_FILE,))
    said = call.values.get(HOST_FILE)
    if said is None or not said.value or said.value in launch.texts:
        return launch
    name = str(said.value)
    is_file = name.endswith((".json", ".hjson")) and find(name, folder_of(document.name))
    if is_file:
        place = (said.setting, said.source, said.line or 0)
        sources = {**launch.sources, len(launch.words): place}
        return replace(launch, sources=sources).with_words((option, name))
    BridgeError.raise_if(
        f"{said.source}: line {said.line}: {said.setting}: found {brief(name)}, expected the name of a DeepSpeed file"
        " (.json) that is there; write the config into one, and name it in the call"
        for _ in range(is_read)
    )
    return launch


def place_of(name: str, beside: str) -> str:
    """Return the path of a file that a source names: in the source's folder, else in the current one; in the first where
    it is in neither.
    """
    return str(find(name, Path(beside).parent) or Path(beside).parent / name)


def _launch_document(source: Source, document: Document) -> tuple[Document, tuple[Finding, ...]]:
    """Return the launch that the config of a host next to a DeepSpeed file stands for, and findings on that config."""
    name, *more = source.launchers
    starts = isinstance(document.data, Script) or registry.find_host(document.data)
    if more or starts or source.file == STDIN or not registry.score(HOST_FILE, document.data):
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
    started: Document = host.launch(config, source.file)
    return started, tuple(placed)


def release_of(
    source: Source, dialect: StackTables, version: str | None
) -> tuple[str | None, tuple[Finding, ...]]:
    """Return the release to use for `version`.

    With --nearest, an unknown release is replaced by the nearest known release, and a finding says
    so.
    """
    if version is None or version in dialect.versions:
        return version, ()
    near, said = dialect.nearest(version)
    if not source.nearest:
        raise VersionError(
            f"{dialect.name}: {unknown_release(version, dialect.versions)}; --nearest uses {near} instead"
        )
    return near, (said,)


def dialect_of(source: Source, document: Document) -> Dialect:
    """Return the dialect that --from names, else the dialect that recognises the document."""
    if not source.dialect:
        return recognise_dialect(document)
    dialect = registry.load(source.dialect)
    if said := registry.name_lookalike(dialect.name, document.data):
        raise SourceError(f"{document.name}: {said}")
    return dialect


def read_as(source: Source, dialect: Reader, document: Document, version: str | None) -> Config:
    """Return the config that `dialect` reads from the document for a release."""
    # Noted now, for the error that may follow when sizes do not match (bridge.api.access).
    if (
        dialect.coded
        and not source.code
        and source.file != STDIN
        and not isinstance(document.data, Script)
    ):
        note_file(Path(source.file))
    known = signature(dialect.read).parameters
    lent = {option.replace("_", "-") for option in source.lent}
    said = {
        word: value
        for word, value in source.settings_of_options.items()
        if word in known
        or not (source.loose or word == "open_auto" or OPTIONS.get(word, word) in lent)
    }
    strange = (OPTIONS.get(word, word) for word in said if word not in known)
    # Of one file this is a mistake. Of several (`loose`) the option is meant for those that can use it.
    BridgeError.raise_if(
        [f"--{word}: {dialect.name} has no use for this option; drop it" for word in strange]
    )
    return add_caller(
        dialect.read(document, version, source.world_size, source.lenient, **said), document
    )


def _resolve_release(document: Document, source: Source) -> Document:
    """Return the document.

    A shell script gets the environment and the launch that the options name.
    """
    if isinstance(document.data, Script):
        return replace(document, data=document.data.start_with(source.outside, source.launch))
    typed = [
        name for name in ("env", "launch") if getattr(source, name) and name not in source.lent
    ]
    if typed and not source.loose:
        raise BridgeError(f"{document.name}: --env and --launch are for shell scripts; drop them")
    return document


def document_of(source: Source) -> Document:
    """Return the source's file as data; a script gets the environment that the user gives.

    From here on, secrets of the file are hidden in all output.
    """
    standard = source.file == STDIN
    name = source.title if standard else source.file
    text = text_of(source)
    # Before it is parsed: errors of the parser quote the text.
    keep_hidden(text[: limits.TEXT], source.outside)  # what is longer is refused unread
    document = _resolve_release(
        parse(text, name, "" if standard else Path(source.file).suffix.lower()), source
    )
    if isinstance(document.data, Script):
        keep_hidden("", document.data.variables_with_value)
    return document


def text_of(source: Source) -> str:
    """The text of the source's file."""
    if source.text is not None:
        return source.text
    return standard_input() if source.file == STDIN else read_text(Path(source.file))


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


CONFIG = "config.json"


def is_folder(model: str) -> bool:
    """Return whether the value of `--model` is a folder with a model, rather than a name."""
    return (Path(model) / CONFIG).is_file()


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`, or the folder of a model; else raise `BridgeError`."""
    if value in choices or is_folder(value):
        return value
    expectation = f"{' or '.join(choices)}, or a folder with a {CONFIG}"
    raise BridgeError(f"{option}: found {value}, expected {expectation}{nearest(value, choices)}")


def model_in(folder: str) -> Model:
    """The shape of the model in a folder."""
    return lift(read_config(Source(str(Path(folder) / CONFIG)))).model
