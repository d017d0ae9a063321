"""Move: a run with its config and its checkpoint in a folder from which another stack resumes it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Unpack, cast

from bridge.api.access import open_source
from bridge.api.move_target import (
    CHECKPOINT,
    LAUNCH,
    NATIVE,
    PROOF,
    REPORT,
    RUNNING,
    MoveOptions,
    MoveSource,
    MoveTarget,
    count_samples,
    find_other_settings,
    groups_of_run,
    make_target,
    model_config,
    read_move_source,
    report_text,
)
from bridge.api.source import STDIN, Options, Readable, Source, source_of
from bridge.checkpoint import formats, interface, model_facts, smaller_model
from bridge.checkpoint.files import File
from bridge.checkpoint.groups import Row
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.interface import Format, PlannedFiles as Files
from bridge.checkpoint.targets import WEIGHTLESS
from bridge.checkpoint.writing import write_checkpoint
from bridge.engine.backends import backends
from bridge.engine.interface import Backend
from bridge.engine.native import BACKEND
from bridge.errors import BridgeError, SourceError
from bridge.files import as_private_as, read_text
from bridge.report import json_types
from bridge.stack import launch_command
from bridge.stack.checkpoint_side import side_of
from bridge.stack.dialect import Config
from bridge.stack.extras import need_engine
from bridge.stack.findings import Finding
from bridge.verify.local import MARK, run_ranks

RANK = "bridge.api.move_on_rank"


@dataclass(frozen=True)
class Proof:
    """The input of a proof apart from the two configs.

    `layers` is None for all layers, `lacking` are the reasons why the proof is partial, `edits` are
    config settings for the target's checkpoint, and `groups` the optimizer's groups by side.
    """

    source: Backend
    target: Backend
    world: int
    layers: int | None
    model: Mapping[str, Any]
    lacking: tuple[str, ...]
    edits: Mapping[str, Any]
    groups: Mapping[str, tuple[Row, ...]]


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


def proof_parties(options: MoveOptions, source: MoveSource, target: MoveTarget) -> Proof:
    """Return the input of the proof: engines, ranks and model.

    Raises `BridgeError`, before anything is written, if the proof cannot run.
    """
    if source.format.name in WEIGHTLESS:
        raise BridgeError(
            f"--prove: {source.format.title} holds only weights, so that no run can resume from "
            "it; drop --prove"
        )
    one = engine_for_format(source.config, source.format.name)
    other = engine_for_format(
        target.config, NATIVE if options.to == NATIVE else target.saves.format
    )
    if options.model is None:
        raise BridgeError(
            "--prove: the model is not known; name the folder of its config.json with --model"
        )
    given = json.loads(read_text(options.model / "config.json"))
    layers = _layers_for_proof(source.hub, options.most)
    model, dropped = smaller_model.without_dropout(
        smaller_model.config_with_layers(given, layers) if layers else given
    )
    # Under the names that transformers gives the parameters of the model, which `_check_alike` compares by.
    described = model_facts.describe_config(model_config(options.model))
    hub = model_facts.rename_under(source.hub, None, RUNNING, [(str(options.model), described)])
    running = smaller_model.cut_layers(hub, layers) if layers else hub
    _check_alike(running, model)
    # No more ranks than the run had, unless an engine needs them.
    saved = max(source.hub.origin.world or 1, source.config.world_size or 1)
    world = max(one.least, other.least, min(options.ranks, saved))
    cut = [f"only the first {layers} layers ran"] if layers else []
    lacking = (*cut, *(f"taken out: {name}" for name in dropped))
    told = {
        "source": groups_of_run(running, source.config),
        "target": tuple(_groups_within(target.groups, running)),
    }
    return Proof(one, other, world, layers, model, lacking, target.edits, told)


def _groups_within(groups: tuple[Row, ...], hub: Hub) -> Iterator[Row]:
    """Yield the groups, reduced to parameters that `hub` has. Empty groups are left out."""
    for row in groups:
        names = [name for name in row["params"] if name in hub.parameters]
        if names:
            yield {**row, "params": names}


def engine_for_format(config: Config, format: str) -> Backend:
    """Return the engine that can resume from a checkpoint of `format` with `config`."""
    name = config.dialect.name
    backend = backends(name).get(name)
    if format == NATIVE:
        return (backend.inside if backend else None) or BACKEND
    if format not in side_of(config.dialect).loads or backend is None:
        known = ", ".join((NATIVE, *side_of(config.dialect).loads))
        raise BridgeError(
            f"--prove: {config.dialect.title} resumes from {known}, but the checkpoint is "
            f"{format}; drop --prove"
        )
    if backend.release is None:
        raise BridgeError(
            f"--prove: {backend.title} is not installed here; install it, or drop --prove"
        )
    return backend


def _layers_for_proof(hub: Hub, most: int) -> int | None:
    """Return the number of layers to run of a model that is too large for this machine; None: all layers."""
    count = max(smaller_model.layers_of(hub).values(), default=0)
    if smaller_model.count_elements(hub) <= most or count < 2:
        return None
    return max(
        (number for number in range(1, count) if smaller_model.count_elements(hub, number) <= most),
        default=1,
    )


def _check_alike(hub: Hub, model: Mapping[str, Any]) -> None:
    """Raise `SourceError` unless the model has exactly the parameters of the checkpoint, because
    engines may identify parameters by index alone.
    """
    import torch

    from bridge.engine.models.pretrained import open_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        # On the meta device a model has shapes and no memory, so that a large one can be held too.
        with torch.device("meta"):
            known = {
                name: tuple(weight.shape)
                for name, weight in open_model(Path(folder), 0).named_parameters()
            }
    found = {name: held.weight.shape for name, held in hub.parameters.items()}
    names = [name for name in dict.fromkeys((*known, *found)) if known.get(name) != found.get(name)]
    SourceError.raise_if(
        f"--model: {name}: {known.get(name, 'missing')} in this model, {found.get(name, 'missing')} "
        "in the checkpoint; name the model of the checkpoint"
        for name in names[:5]
    )


def prove_move(
    run: Source,
    options: MoveOptions,
    source: MoveSource,
    proof: Proof,
    hear: Callable[[Mapping[str, Any]], None],
) -> json_types.Proved:
    """Run both sides on ranks of this machine.

    Returns the proof and writes it into the output folder.
    """
    with tempfile.TemporaryDirectory() as folder, as_private_as(folder):
        top = Path(folder)
        (top / "model").mkdir()
        (top / "model" / "config.json").write_text(json.dumps(proof.model))
        starts = _proof_starts(top, options, source, proof)
        spec = {
            "run": run.values(),
            "options": {
                **asdict(options),
                **{name: str(getattr(options, name)) for name in ("checkpoint", "output", "model")},
            },
            "world": proof.world,
            "formats": {"source": source.format.name, "target": starts.pop("format")},
            "edits": dict(proof.edits),
            "groups": proof.groups,
            "starts": {name: str(path) for name, path in starts.items()},
            "model": str(top / "model"),
        }
        found: dict[str, Any] = {}
        # Stacks print to stdout too: only marked lines are ours.
        for line in run_ranks(proof.world, RANK, json.dumps(spec, default=str)):
            said = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
            hear(said)
            found = said.get("found", found)
    if "problems" in found:
        raise BridgeError(*found["problems"])
    lacking = [*proof.lacking, *found.pop("changed")]
    # The same run of a model that was cut proves nothing about the layers that were left out.
    verdict = "in part" if found["verdict"] == "same" and proof.lacking else found["verdict"]
    told = cast(
        json_types.Proved, {**found, "verdict": verdict, "lacking": lacking, "ranks": proof.world}
    )
    with as_private_as(options.checkpoint):
        (options.output / PROOF).write_text(json.dumps(told, indent=1) + "\n")
    return told


def _proof_starts(
    top: Path, options: MoveOptions, source: MoveSource, proof: Proof
) -> dict[str, Any]:
    """Return, for each side of the proof, the checkpoint from which its run starts.

    The checkpoint on disk is used if the ranks of the proof can read it; else a new one is written.
    """
    format, place = formats.find_checkpoint(options.output / CHECKPOINT)
    target = formats.read_at(format, place)
    sides = {
        "source": (source.hub, source.format, source.place, proof.source),
        "target": (target, format, place, proof.target),
    }
    found: dict[str, Any] = {"format": format.name}
    for side, (hub, form, where, backend) in sides.items():
        held = backend.as_loaded(
            smaller_model.cut_layers(hub, proof.layers) if proof.layers else hub
        )
        layout = hub.origin.layout
        # Some formats can be read only by as many ranks as wrote them.
        fits = not form.fixed or layout.get("ranks") == hub.origin.world == proof.world
        found[side] = (
            where
            if held is hub and fits
            else _write_checkpoint(top / side, held, form, proof.world)
        )
    # A third run in fp32, from the same masters, tells how far rounding alone takes the losses.
    if source.hub.weight_dtype in ("BF16", "F16"):
        held = proof.source.as_loaded(
            smaller_model.cut_layers(source.hub, proof.layers) if proof.layers else source.hub
        )
        found["wider"] = _write_checkpoint(
            top / "wider", replace(held, scale=None), source.format, proof.world, "F32"
        )
    return found


def _write_checkpoint(
    folder: Path, hub: Hub, format: Format, world: int, dtype: str | None = None
) -> Path:
    """Write a checkpoint for the proof. Returns the tag folder inside `folder`."""
    files = formats.plan_files(
        format, hub, interface.Wanted(dtype, world, hub.origin.layout.get("zero"))
    )
    write_checkpoint(files, folder, hub.origin.files, lambda count, fresh: None)
    return formats.find_checkpoint(folder, format.name)[1]
