"""Proof of a move: both runs resume on ranks of this machine, and are compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from bridge.api.move_target import (
    CHECKPOINT,
    NATIVE,
    PROOF,
    RUNNING,
    MoveOptions,
    MoveSource,
    MoveTarget,
    groups_of_run,
    model_config,
)
from bridge.api.source import Source
from bridge.checkpoint import formats, interface, model_facts, smaller_model
from bridge.checkpoint.groups import Row
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.interface import Format
from bridge.checkpoint.targets import WEIGHTLESS
from bridge.checkpoint.writing import write_checkpoint
from bridge.engine.backends import backends
from bridge.engine.interface import Backend
from bridge.engine.native import BACKEND
from bridge.errors import BridgeError, SourceError
from bridge.files import as_private_as, read_text
from bridge.report import json_types
from bridge.stack.checkpoint_side import side_of
from bridge.stack.dialect import Config
from bridge.verify.local import run_ranks
from bridge.verify.rank_messages import MARK

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
            "run": asdict(run),
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
