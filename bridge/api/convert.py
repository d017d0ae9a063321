"""Convert: a config in another stack, what was lost on the way, and the files to write."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from bridge.api.access import open_source, place_source
from bridge.api.read import read_config, release_of, text_of
from bridge.api.source import STDIN, Options, Readable, Source, source_of
from bridge.errors import BridgeError, SourceError, TranslationError
from bridge.files import LOADERS, Original, as_private_as
from bridge.files.lock import shared
from bridge.files.notes import note
from bridge.files.secrets import HIDDEN
from bridge.report.as_json import remarks_of
from bridge.stack import registry
from bridge.stack.dialect import Config, Dialect, Writer, Written
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation import sidecar as carry_over, sidecar_beside
from bridge.translation.launch_script import add_script
from bridge.translation.sidecar_beside import Sidecar
from bridge.translation.translate import Result, translate
from bridge.translation.write_outputs import leave_no_sidecar, not_over_input, place_files

Before = tuple[Original, str]
"""A text that the target was once read from, and the release for which it was read."""


@dataclass(frozen=True)
class Converted:
    """A conversion: the translation, its findings, the texts of the files by path, and the notes.

    Without an output there are no files, and the text is `result.written.text`.
    """

    result: Result
    findings: tuple[Finding, ...]
    files: Mapping[Path, str]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The converted config in its stack's own form."""
        return self.result.written.text


def convert(
    readable: Readable,
    /,
    to: str,
    *,
    to_version: str | None = None,
    output: str | os.PathLike[str] | None = None,
    strict: bool = False,
    carry: bool = True,
    script: bool = False,
    force: bool = False,
    dry_run: bool = False,
    **options: Unpack[Options],
) -> Converted:
    """Convert a config to the stack `to`, and write it to `output` with the files that go with it.

    With `carry` the sidecar beside the source is read and the one beside the output is written; with `script`
    the script that starts the run is written too. A file that a person edited is replaced only with `force`,
    and `dry_run` writes nothing. Raises `BridgeError` for what cannot be read, translated or written, and with
    `strict` for any loss; the error's `part` is then the `Result`.
    """
    source, place = source_of(readable, options), None if output is None else Path(output)
    if place is not None and (not place.name or place.is_dir() or output == STDIN):
        raise SourceError(f"output: found {str(output)!r}, expected the name of a file to write")
    with open_source(source) as notes:
        result, beside = _translate_file(source, to, to_version, carry, place)
        if strict and not (result.exact and not beside.edited):
            raise _loss_error(result, beside)
        if place is not None:
            before = _content_before(result, beside)
            result = replace(result, put=write_in_format(result, place, before))
        result = add_script(result, place) if script else result
        if place is None:
            return Converted(result, remarks_of(result), {}, tuple(notes))
        texts = files_to_write(result, place, carry)
        not_over_input(source.file, texts)
        if not dry_run:
            left = None if carry else leave_no_sidecar(place, force)
            # Secrets may come from those files, so OUT is readable by no more people than they are.
            with as_private_as(*beside.sources):
                place_files(texts, place, force, "--dry-run shows the changes")
            if left:
                left.unlink()
                note(f"note: {left} is removed, as it belongs to the file that was replaced")
        if result.put:
            # The command of the report is for the folder in which this one was typed.
            result = replace(result, put=result.put.below(place.parent))
        return Converted(result, remarks_of(result), texts, tuple(notes))


def _translate_file(
    source: Source, to: str, version: str | None, carry: bool, output: Path | None
) -> tuple[Result, Sidecar]:
    """Read and translate the source's file. Returns the result, and the sidecar that was read with the file."""
    target = registry.load(to)
    # File and sidecar are one set: another run must not replace one of them between the two reads.
    with place_source(source) as here, lock_source(here):
        # Read once: the sidecar's digest, the config and the text that comes back are of the same bytes.
        here = replace(here, text=text_of(here))
        beside = sidecar_of(here) if carry else Sidecar()
        if said := beside.note(source.file, target, "--no-carry"):
            note(said)
        result = translate_source(here, target, version, beside)
        carried = _carry_with_original(here, result, output)
    # The copy of a file of a commit is gone by now: nothing can be read from it on the way back.
    kept = carried if here.file == source.file else replace(carried, source="")
    return replace(result, carry=kept), beside


def translate_source(
    source: Source, target: Dialect, version: str | None, beside: Sidecar
) -> Result:
    """Translate a source into another dialect, with the carry-over from the sidecar of an earlier conversion."""
    carry, config = beside.fitting(target), read_config(source)
    config = _apply_world_size(source, config, carry) if carry else config
    near, said = release_of(source, target, version)
    world = config.world_size if carry else source.world_size
    result = translate(config, target, near, world, carry)
    odd = beside.remarks(target, Path(source.file), config)
    for finding in odd if beside.unfit(target) else ():
        if finding.effect is Effect.NONE:  # the report shows it with --all alone
            note(f"note: {finding.path}: {finding.message}")
    return replace(result, findings=(*said, *odd, *result.findings))


def _apply_world_size(source: Source, config: Config, carry: carry_over.Carry) -> Config:
    """Return `config` with the number of ranks that the sidecar names, if nothing else gives that
    number and the config can run on these ranks.
    """
    if config.world_size or not carry.world_size:
        return config
    try:
        # The file may have been edited since, and then these ranks may not fit it.
        sized = read_config(replace(source, world_size=carry.world_size))
    except BridgeError:
        return config
    note(
        f"note: read for {carry.world_size} ranks, the number in the sidecar; --world-size N changes that"
    )
    return sized


def sidecar_of(source: Source) -> Sidecar:
    """Return the sidecar of the source's file, which is empty for standard input."""
    if source.file == STDIN:
        return Sidecar()
    file = Path(source.file)
    beside = sidecar_beside.beside(file, source.text)
    return beside.judged(file, read_config(source)) if beside.edited else beside


@contextmanager
def lock_source(source: Source) -> Iterator[None]:
    """Context in which no other run writes the source's file and the files beside it."""
    with shared(Path() if source.file == STDIN else Path(source.file).parent):
        yield


def write_in_format(result: Result, output: Path, before: Before | None = None) -> Written:
    """Return the target, written in the format of `output`'s suffix.

    If `before` is the text that the target was once read from, new values are written into that
    text.
    """
    dialect = result.config.dialect
    written = dialect.rewritten(result.config, *before, output) if before else None
    return (written or dialect.render(result.config, format_for(dialect, output))).under_name(
        output.name
    )


def files_to_write(result: Result, output: Path, with_carry: bool) -> dict[Path, str]:
    """Return the text of each file to write, by path: the converted config, and the files that accompany it."""
    written = result.put or write_in_format(result, output)
    texts = result.config.dialect.files(written, output)
    named = {path.name: text for path, text in texts.items()}
    carried = (
        {carry_over.beside(output): result.carry.text(written.text, named)} if with_carry else {}
    )
    return {**texts, **carried}


def format_for(dialect: Writer, output: Path) -> str | None:
    """Return the format that the suffix of `output` stands for, or None for an unknown suffix.

    Raises `SourceError` for the suffix of a format that the dialect cannot write.
    """
    format, suffix = dialect.format_of(output), output.suffix.lower()
    # A stack may read a format that it does not write, as DeepSpeed does launch scripts.
    written = {*dialect.formats, *dialect.alike}
    if suffix in LOADERS and format not in written:
        fitting = " or ".join(
            suffix for suffix in LOADERS if dialect.format_of(f"x{suffix}") in written
        )
        raise SourceError(
            f"{output}: found suffix {suffix}, in which configs of {dialect.title} cannot be written; "
            f"use {fitting}"
        )
    return format


def _carry_with_original(source: Source, result: Result, output: Path | None) -> carry_over.Carry:
    """Return the carry-over. Its `secrets` are the values that the sidecar must not contain.

    The carry-over includes the text of the source's file if the dialect can write values back into such a text.
    """
    if source.file == STDIN:
        return replace(result.carry, secrets=HIDDEN)
    file = Path(source.file)
    original = Original(text_of(source), file.suffix.lower(), source.outside, source.launch)
    rewritable = original.document.format in result.source.dialect.rewrites
    real, folder = os.path.realpath(file), os.path.realpath((output or file).parent)
    # Relative if the source lies below the output, so that the folder can be moved as a whole.
    near = os.path.relpath(real, folder) if Path(real).is_relative_to(folder) else real
    return replace(
        result.carry,
        original=original if rewritable else None,
        secrets=original.secrets,
        source=near,
    )


def _content_before(result: Result, beside: Sidecar) -> Before | None:
    """Return the text that the target was originally read from.

    If source and target are of one stack, this is the source's file; else it is the text in the
    sidecar.
    """
    if result.source.dialect.name == result.config.dialect.name:
        return (result.carry.original, result.source.version) if result.carry.original else None
    carry = beside.fitting(result.config.dialect)
    return (carry.original, carry.version) if carry and carry.original else None


def _loss_error(result: Result, beside: Sidecar) -> TranslationError:
    lost = [finding for finding in result.findings if finding.matters]
    odd = [finding for finding in beside.findings if beside.edited and finding not in lost]
    problems = (
        f"{finding.path}: {f'{finding.how}: ' if finding.how else ''}{finding.message}"
        for finding in (*odd, *lost)
    )
    error = TranslationError(
        *problems, "strict: nothing was written; drop --strict to accept the loss"
    )
    error.part = result
    return error
