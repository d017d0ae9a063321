"""Reads checkpoints of NeMo AutoModel without AutoModel: `model/` and `optim/` in a folder for each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bridge.checkpoint import dcp, safetensors_format
from bridge.checkpoint.archive import Used
from bridge.checkpoint.dcp import StoredEntry
from bridge.checkpoint.hub import Hub, loss_finding
from bridge.checkpoint.interface import Format
from bridge.errors import SourceError
from bridge.files.contained import path_inside
from bridge.stack.rules import Effect

LATEST, MODEL, OPTIMIZER, SCHEDULE = "LATEST", "model", "optim", "sched"
CONSOLIDATED = "consolidated"
UNREAD = {
    "rng*": "random states are not carried over, so dropout draws other numbers",
    "dataloader*": (
        "the position in the data is not carried over; the data starts from the beginning"
    ),
}
"""Files of a checkpoint that only AutoModel can read (recipes/base_recipe.py: save_checkpoint). For
each file name: a message about what a converted checkpoint lacks.
"""


class Folder(Format):
    """A checkpoint of AutoModel's recipes (components/checkpoint/checkpointing.py: Checkpointer)."""

    name = "automodel"
    title = "NeMo AutoModel"

    def find(self, folder: Path) -> Path | None:
        """Return the checkpoint folder: `folder` itself, or the folder to which the link LATEST
        points. None if it is no checkpoint of AutoModel.
        """
        place = path_inside(folder / LATEST, folder) if (folder / LATEST).is_dir() else folder
        return (
            place
            if (place / OPTIMIZER / dcp.METADATA).is_file() and (place / MODEL).is_dir()
            else None
        )

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Check the files as every format does, and the checksums inside torch's archives.
        Safetensors have no checksums.
        """
        super().verify(place, used)
        for part in (MODEL, OPTIMIZER):
            if (place / part / dcp.METADATA).is_file():
                dcp.verify_checksums(place / part, dcp.KNOWN, used)

    def read(self, place: Path) -> Hub:
        """Read weights, optimizer state by the names of the weights, and torch's
        scheduler state.
        """
        weights, files = _weights(place / MODEL)
        entries = dcp.read_entries(place / OPTIMIZER)
        schedule = {
            ".".join(map(str, entry.path[1:])): entry.value
            for entry in entries.values()
            if entry.path[0] == SCHEDULE
        }
        rest = {key: entry for key, entry in entries.items() if entry.path[0] != SCHEDULE}
        parts = (place / OPTIMIZER / dcp.METADATA, *sorted((place / OPTIMIZER).glob("*.distcp")))
        hub = dcp.hub_of(self.name, place, {**weights, **rest}, (*files, *parts))
        unread = [
            loss_finding(pattern.rstrip("*"), message, Effect.NUMBERS)
            for pattern, message in UNREAD.items()
            if any(place.glob(pattern))
        ]
        return replace(hub, schedule=schedule or None, findings=(*hub.findings, *unread))


def _weights(place: Path) -> tuple[Mapping[str, StoredEntry], tuple[Path, ...]]:
    """Return the tensors of the model and the files that hold them, in torch's format or as
    safetensors. Raises `SourceError` for sharded safetensors.
    """
    if (place / dcp.METADATA).is_file():
        return dcp.read_entries(place), (place / dcp.METADATA, *sorted(place.glob("*.distcp")))
    # Whole tensors are in consolidated/, or here if the files have the usual names.
    whole = safetensors_format.Safe().find(place / CONSOLIDATED) or safetensors_format.Safe().find(
        place
    )
    if whole is None:
        raise SourceError(
            f"{place}: the safetensors hold only parts of tensors; run the consolidate.sh of the"
            " checkpoint"
        )
    hub = safetensors_format.Safe().read(whole)
    return {
        name: StoredEntry((name,), parameter.weight) for name, parameter in hub.parameters.items()
    }, hub.origin.files


FORMATS: tuple[Format, ...] = (Folder(),)
