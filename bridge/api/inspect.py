"""Inspect: what a checkpoint holds, what is damaged in it, and the formats that it can be converted to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bridge.api.read import read_config
from bridge.api.source import Source
from bridge.checkpoint import formats
from bridge.checkpoint.companions import config_beside, is_of_transformers, refuse_contradictions
from bridge.checkpoint.hub import Hub, Model
from bridge.checkpoint.model_facts import describe_config
from bridge.checkpoint.targets import Target, list_targets
from bridge.errors import BridgeError
from bridge.files.contained import refuse_changes, stamps_of
from bridge.files.notes import gather_notes, note
from bridge.stack.extras import need_engine
from bridge.stack.findings import Finding


@dataclass(frozen=True)
class Inspected:
    """A checkpoint with its tensors, which are read when they are used, its place on the disk, the formats that it can be
    converted to, and the notes that were made.
    """

    hub: Hub
    place: Path
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is damaged, or was lost when the checkpoint was written."""
        return self.hub.findings


def inspect(
    folder: str | os.PathLike[str],
    /,
    *,
    format: str | None = None,
    root: str | None = None,
    check: bool = False,
) -> Inspected:
    """Read what a checkpoint holds, without executing anything in it.

    `format` and `root` choose what is read if a folder holds several formats, or a file several models. With
    `check` all files are held against their own checksums. Raises `BridgeError` if there is no checkpoint, or
    if it is damaged.
    """
    need_engine("checkpoint")
    with gather_notes() as notes:
        kind, place = formats.find_checkpoint(Path(folder), format, root)
        if check:
            formats.verify_checkpoint(kind, place)
        hub = formats.read_at(kind, place)
        if check:
            hub = formats.add_doubts(kind, place, hub)
            refuse_changes(stamps_of(hub.origin.files))
        targets = list_targets(hub, describe_configs(place, None))
        return Inspected(hub, place, tuple(targets), tuple(notes))


def describe_configs(place: Path, given: Path | None) -> list[tuple[str, Model]]:
    """Return what the config next to a checkpoint, and one that the user gives, say of the model, each with
    its path. Raises `BridgeError` if the user's cannot be read.
    """
    configs = []
    for path in dict.fromkeys(filter(None, (config_beside(place), given))):
        try:
            if not path.is_file():
                raise BridgeError("found no regular file")
            configs.append(
                (str(path), describe_config(read_config(Source(str(path), lenient=True))))
            )
        except BridgeError as error:
            # What is no config of transformers says nothing about the weights beside it.
            if path == given or not path.is_file() or is_of_transformers(path.read_bytes()):
                raise BridgeError(
                    *(f"{path}: {problem}; correct this config" for problem in error.problems)
                ) from None
            note(f"note: {path}: not held against the weights, as it cannot be read: {error}")
    own = config_beside(place)
    if own and given and own != given and given.is_file():
        refuse_contradictions(own, given)
    return configs
