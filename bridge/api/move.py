"""Move: a run with its config and its checkpoint in a folder from which another stack resumes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Unpack

from bridge.api.access import open_source
from bridge.api.move_proof import Proof, proof_parties, prove_move
from bridge.api.move_target import (
    CHECKPOINT,
    LAUNCH,
    REPORT,
    MoveOptions,
    MoveSource,
    MoveTarget,
    count_samples,
    find_other_settings,
    make_target,
    read_move_source,
    report_text,
)
from bridge.api.source import STDIN, Options, Readable, Source, source_of
from bridge.checkpoint import formats, interface
from bridge.checkpoint.files import File
from bridge.checkpoint.interface import PlannedFiles as Files
from bridge.checkpoint.writing import write_checkpoint
from bridge.errors import BridgeError
from bridge.files import as_private_as
from bridge.report import json_types
from bridge.stack import launch_command
from bridge.stack.extras import need_engine
from bridge.stack.findings import Finding


@dataclass(frozen=True)
class Moved:
    """A run that was moved: how it is read, both sides, the files of the checkpoint, the findings, the text of
    the report, and the notes that were made. `parties` is the input of the proof if there is to be one, and
    `proof` its result.
    """

    run: Source
    options: MoveOptions
    source: MoveSource
    target: MoveTarget
    files: Files
    findings: tuple[Finding, ...]
    parties: Proof | None
    report: str
    proof: json_types.Proved | None = None
    notes: tuple[str, ...] = ()


def move(
    readable: Readable,
    /,
    checkpoint: str | os.PathLike[str],
    to: str,
    output: str | os.PathLike[str],
    *,
    model_folder: str | os.PathLike[str] | None = None,
    prove: int | None = None,
    ranks: int = 2,
    to_version: str | None = None,
    from_format: str | None = None,
    processes: int = 1,
    dry_run: bool = False,
    verify: bool = True,
    **options: Unpack[Options],
) -> Moved:
    """Move a run to the stack `to`, or to the `native` engine: its config, code part, launch and checkpoint in `output`.

    `prove` resumes the old and the new run for so many steps on at most `ranks` ranks of this machine;
    `processes` share the files to be written, and `verify` holds the checkpoint against its own checksums
    first. Raises `BridgeError` for what cannot be read, translated or written.
    """
    asked = MoveOptions(
        Path(checkpoint),
        to,
        Path(output),
        to_version,
        from_format,
        None if model_folder is None else Path(model_folder),
        prove,
        ranks,
        processes,
        dry_run,
        verify,
    )
    source = source_of(readable, options)
    with open_source(source) as notes:
        moved = write_run(source, asked)
        return replace(moved, proof=prove_run(moved), notes=tuple(notes))


Meter = Callable[[int], Callable[[int, bool], None]]
"""Gets the number of bytes to write, and returns what gets the number of bytes of each part, and whether it was
written now rather than by an earlier move that was killed.
"""


def write_run(
    run: Source, options: MoveOptions, meter: Meter = lambda total: lambda count, fresh: None
) -> Moved:
    """Translate a run and write it, unless it is a dry run."""
    need_engine("move")
    if options.dry_run and options.prove:
        raise BridgeError(
            "--prove: found with --dry-run, which writes nothing to prove; drop one of them"
        )
    source, run = read_move_source(run, options)
    target = make_target(run, options, source)
    hub = count_samples(target.hub, source, target)
    if target.written.beside and "step" not in hub.client:
        # The training scripts that we write ask the client's state of the checkpoint for the step.
        hub = replace(
            hub, client={**hub.client, "step": (hub.where.steps or 0) + (hub.where.skipped or 0)}
        )
    format = formats.format_of_name(target.saves.format)
    wanted = interface.Wanted(target.saves.dtype, target.saves.ranks, target.saves.level)
    files = formats.plan_files(format, hub, wanted)
    odd = tuple(find_other_settings(source))
    findings = (*target.findings, *hub.findings, *files.findings, *odd)
    # Before anything is written: a proof that cannot run is refused with the folder still empty.
    parties = proof_parties(options, source, target) if options.prove else None
    told = replace(files, findings=(*files.findings, *odd))
    said = report_text(source, target, told, findings, options.output)
    if not options.dry_run:
        # One set of files, renamed as one: a move that was killed leaves no config beside half a checkpoint.
        whole = _gather_files(target, files, said)
        config = [] if run.file == STDIN else [run.file]
        origin = source.hub.origin.files
        with as_private_as(options.checkpoint, *origin, *config):
            meet = meter(sum(file.size for file in whole.files))
            write_checkpoint(whole, options.output, origin, meet, options.processes)
    return Moved(run, options, source, target, files, findings, parties, said)


def prove_run(
    moved: Moved, hear: Callable[[Mapping[str, Any]], None] = lambda said: None
) -> json_types.Proved | None:
    """Prove a run that was written, if that was asked for. `hear` gets what the ranks say of their progress."""
    if moved.parties is None:
        return None
    try:
        return prove_move(moved.run, moved.options, moved.source, moved.parties, hear)
    except BridgeError as error:
        kept = f"{moved.options.output} is written whole, and only its proof failed"
        raise BridgeError(*(f"{problem}; {kept}" for problem in error.problems)) from None


def _gather_files(target: MoveTarget, files: Files, said: str) -> Files:
    """Return all files of the move: the checkpoint in a folder of its own, and next to that folder
    the config, the launch script and the report.
    """
    texts = {**target.texts, LAUNCH: _launch_text(target), REPORT: said}
    small = tuple(File(name, (text.encode(),)) for name, text in texts.items())
    moved = tuple(replace(file, name=f"{CHECKPOINT}/{file.name}") for file in files.files)
    return replace(files, files=(*moved, *small), sums=f"{CHECKPOINT}/{files.sums}")


def _launch_text(target: MoveTarget) -> str:
    """Return a shell script that starts the run from the checkpoint.

    If the run also needs lines in the user's training script, comments show these lines.
    """
    written = target.written
    lines = ["#!/bin/sh", f"# Resumes from the checkpoint in {CHECKPOINT}/."]
    if written.snippet:
        lines += [
            "# Put these lines into your training script:",
            *(f"#   {line}" for line in written.snippet.splitlines()),
        ]
    lines += ["set -e", 'cd "$(dirname "$0")"']
    lines += [f"export {name}={quote(value)}" for name, value in written.environment.items()]
    return "\n".join(
        (
            *lines,
            launch_command.line(written.command) or "# No command can start the run as it is.",
            "",
        )
    )
