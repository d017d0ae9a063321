"""The file of a job in another stack: translated with what an earlier conversion kept in its sidecar,
and the texts of the files to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bridge.cli import sidecar
from bridge.cli.file_search import STDIN
from bridge.cli.job import Job
from bridge.cli.read_job import read_job, release_of
from bridge.cli.sidecar import Sidecar
from bridge.cli.terminal import note
from bridge.errors import BridgeError, SourceError
from bridge.files import LOADERS, Original
from bridge.files.lock import shared
from bridge.stack.dialect import Config, Dialect, Writer, Written
from bridge.stack.rules import Effect
from bridge.translation import sidecar as carry_over
from bridge.translation.translate import Result, translate


def translate_job(job: Job, target: Dialect, version: str | None, beside: Sidecar) -> Result:
    """Translate the job's file into another dialect, with the carry-over from the sidecar of an earlier conversion."""
    carry = beside.fitting(target)
    config = _apply_world_size(job, read_job(job), carry) if carry else read_job(job)
    near, said = release_of(job, target, version)
    result = translate(config, target, near, config.world_size if carry else job.world_size, carry)
    odd = beside.remarks(target, Path(job.file), config)
    for finding in odd if beside.unfit(target) else ():
        if finding.effect is Effect.NONE:  # the report shows it with --all alone
            note(f"note: {finding.path}: {finding.message}")
    return replace(result, findings=(*said, *odd, *result.findings))


def _apply_world_size(job: Job, config: Config, carry: carry_over.Carry) -> Config:
    """Return `config` with the number of ranks that the sidecar names, if nothing else gives that
    number and the config can run on these ranks.
    """
    if config.world_size or not carry.world_size:
        return config
    try:
        # The file may have been edited since, and then these ranks may not fit it.
        sized = read_job(replace(job, world_size=carry.world_size))
    except BridgeError:
        return config
    note(
        f"note: read for {carry.world_size} ranks, the number in the sidecar; --world-size N changes that"
    )
    return sized


def sidecar_of(job: Job, wanted: bool = True) -> Sidecar:
    """Return the sidecar of the job's file.

    It is empty for standard input, or if no sidecar is `wanted`.
    """
    if not wanted or job.file == STDIN:
        return Sidecar()
    beside = sidecar.beside(Path(job.file), job.text)
    return beside.judged(Path(job.file), read_job(job)) if beside.edited else beside


@contextmanager
def lock_job(job: Job) -> Iterator[None]:
    """Context in which no other run writes the job's file and the files beside it."""
    with shared(Path() if job.file == STDIN else Path(job.file).parent):
        yield


Before = tuple[Original, str]
"""A text that the target was once read from, and the release for which it was read."""


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
