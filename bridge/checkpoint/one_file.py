"""A checkpoint in one file, as `torch.save` or Lightning writes it, or a file of safetensors."""

from __future__ import annotations

from pathlib import Path

from bridge.checkpoint import archive
from bridge.checkpoint.archive import Used
from bridge.checkpoint.hub import Hub, Origin, kind_of_value
from bridge.checkpoint.interface import RootedFormat
from bridge.checkpoint.run_state import flatten_value, hub_of_entries
from bridge.checkpoint.safetensors_file import read_header
from bridge.errors import SourceError

SAFETENSORS = ".safetensors"


class OneFile(RootedFormat):
    """A file with the state of a run, or of a model, under any keys."""

    name = "file"
    title = "one file of torch.save or safetensors"
    one_file = True
    unseen = "a changed byte of a tensor is not detected"

    def find(self, folder: Path) -> Path | None:
        """Return the path if it is a file; else None."""
        return folder if folder.is_file() else None

    def read(self, place: Path) -> Hub:
        """Return the checkpoint. A pickled dictionary keeps the order of the model."""
        if place.suffix == SAFETENSORS:
            entries = {(name,): tensor for name, tensor in read_header(place, place.parent).items()}
        else:
            contents = archive.read_archive(place, place.parent)
            if not isinstance(contents, dict):
                raise SourceError(
                    f"{place}: found a {kind_of_value(contents)}, expected a dictionary with the state of a model"
                )
            entries = dict(flatten_value(contents))
        origin = Origin(self.name, files=(place,))
        in_order = place.suffix != SAFETENSORS
        return hub_of_entries(origin, place, entries, self.root, in_order)

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Check the checksums within the archive."""
        if place.suffix != SAFETENSORS:
            archive.verify_archive(place, place.parent, used=used)
