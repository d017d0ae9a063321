"""The files in which transformers' Trainer and accelerate save the state of a run beside the weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive, dcp
from bridge.checkpoint.archive import Used
from bridge.checkpoint.hub import Hub, loss_finding
from bridge.checkpoint.run_state import Key, flatten_value, take_run
from bridge.checkpoint.safetensors_format import TRAINER, read_trainer_state
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

STATES = re.compile(
    r"(?:(?P<optimizer>optimizer(?:_\d+)?)\.(?:pt|bin)|(?P<scheduler>scheduler(?:_\d+)?)\.(?:pt|bin)|(?P<scaler>scaler)\.pt"
    r"|(?P<rng>rng_state)(?:_(?P<first>\d{1,9}))?\.pth|(?P<random>random_states)_(?P<rank>\d{1,9})\.pkl)"
)
"""Names of the files with states, as transformers/trainer.py and accelerate/checkpointing.py give them."""
SHARDED = re.compile(r"optimizer(?:_\d+)?")
"""Names of the folders in which accelerate saves the optimizers of FSDP (utils/fsdp_utils.py), and scripts with
transformers' own distributed saving theirs.
"""
UNREAD = ("dl_state_dict*.bin", "sampler*.bin", "custom_checkpoint_*.pkl")
"""Patterns for files with states of a script's own objects, which are not read."""


def optimizer_files(place: Path) -> list[Path]:
    """Return the files and folders in which `place` has optimizers."""
    if not place.is_dir():
        return []
    return [
        path
        for path in sorted(place.iterdir())
        if ((match := STATES.fullmatch(path.name)) and match["optimizer"] and path.is_file())
        or (SHARDED.fullmatch(path.name) and (path / dcp.METADATA).is_file())
    ]


def has_run_files(place: Path) -> bool:
    """Return whether a folder has a file in which Trainer or accelerate saved the state of a run."""
    return (place / TRAINER).is_file() or any(place.glob("random_states_*.pkl"))


def read_run_files(place: Path) -> tuple[dict[Key, Any], tuple[Path, ...], tuple[Finding, ...]]:
    """Return the entries of a run's state in the files beside the weights, these files, and a finding
    that names the files that are not read. Raises `SourceError` if a file is damaged.
    """
    entries: dict[Key, Any] = {}
    files: list[Path] = []
    for path, key in _state_files(place):
        if path.is_dir():
            stored_entries = dcp.read_entries(path)
            entries |= {(key[0], *entry.path[1:]): entry.value for entry in stored_entries.values()}
            files += [path / dcp.METADATA, *sorted(path.glob("*.distcp"))]
        else:
            entries |= dict(flatten_value(archive.read_archive(path, place), key))
            files.append(path)
    if (place / TRAINER).is_file():
        entries[(TRAINER.removesuffix(".json"),)] = read_trainer_state(place)
        files.append(place / TRAINER)
    unread = sorted({path.name for pattern in UNREAD for path in place.glob(pattern)})
    message = f"{', '.join(unread)}: these files hold the state of a script's own objects and are not read"
    return (
        entries,
        tuple(files),
        (loss_finding("client", message, Effect.NUMBERS),) if unread else (),
    )


def _state_files(place: Path) -> Iterator[tuple[Path, Key]]:
    for path in sorted(place.iterdir()):
        match = STATES.fullmatch(path.name)
        if match and path.is_file():
            number = match["first"] or match["rank"]
            kind = next(
                filter(None, match.group("optimizer", "scheduler", "scaler", "rng", "random"))
            )
            yield path, (kind, int(number or 0)) if match["rng"] or match["random"] else (kind,)
        elif SHARDED.fullmatch(path.name) and (path / dcp.METADATA).is_file():
            yield path, (path.name,)


def verify_run_files(place: Path, used: Used | None = None) -> None:
    """Check the checksums within the files of a run's state. `used` limits the check as in
    `archive.verify_archive`.
    """
    for path, _ in _state_files(place):
        if path.is_dir():
            dcp.verify_checksums(path, dcp.KNOWN, used)
        else:
            archive.verify_archive(path, place, used=used)


def with_run_files(hub: Hub, place: Path) -> Hub:
    """Return the checkpoint with what it lacks of the run's state, from the files of Trainer or accelerate in
    the folder `place`: the scheduler, random states and Trainer's own state.
    """
    entries, files, findings = read_run_files(place)
    run = take_run(entries)
    return replace(
        hub,
        origin=replace(hub.origin, files=(*hub.origin.files, *files)),
        schedule=hub.schedule or run.schedule,
        scale=hub.scale or run.scale,
        random={**run.random, **hub.random},
        client={**run.client, **hub.client},
        findings=(*hub.findings, *run.findings, *findings),
    )
