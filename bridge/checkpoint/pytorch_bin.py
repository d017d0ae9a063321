"""The format of pytorch_model.bin, which transformers and DeepSpeed's zero_to_fp32 write: only
weights, in one or more files.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from bridge.checkpoint import archive, torch_save
from bridge.checkpoint.archive import Used
from bridge.checkpoint.hub import Hub, kind_of_value
from bridge.checkpoint.interface import Format, PlannedFiles, Wanted, only_weights
from bridge.checkpoint.lazy import Lazy
from bridge.checkpoint.safetensors_format import (
    FileNames,
    check_tensors,
    divide_into_shards,
    hub_of,
    index_file,
    index_files,
    list_files,
    weights_to_write,
    with_trainer_state,
)
from bridge.errors import SourceError
from bridge.files.shown import show_value

BINARY = FileNames(
    "pytorch_model.bin", "pytorch_model-{:05d}-of-{:05d}.bin", "pytorch_model.bin.index.json"
)


def tensors_of_file(path: Path, root: Path) -> dict[str, Lazy]:
    """Return the tensors of a file by name. Raises `SourceError` if the file contains anything
    else than tensors by name.
    """
    tensors = archive.read_archive(path, root)
    if not isinstance(tensors, dict) or not all(isinstance(key, str) for key in tensors):
        raise SourceError(f"{path}: found a {kind_of_value(tensors)}, expected tensors by name")
    for name, value in tensors.items():
        if not isinstance(value, Lazy):
            raise SourceError(
                f"{path}: found a {kind_of_value(value)} as {show_value(name)}, expected a tensor; is this a "
                "trainer's checkpoint?"
            )
    return tensors


class Binary(Format):
    """The format in which transformers saved weights before safetensors."""

    name = "bin"
    title = "pytorch_model.bin"
    names = "huggingface"
    weights_only = True

    def find(self, folder: Path) -> Path | None:
        """Return the folder if it has files with this format's names; else None."""
        return (
            folder
            if (folder / BINARY.index).is_file() or (folder / BINARY.alone).is_file()
            else None
        )

    def read(self, place: Path) -> Hub:
        """Return a checkpoint with all weights, in the order of the model."""
        # `state_dict()` lists parameters in the order of the modules, and a pickled dictionary
        # keeps its order.
        paths = list_files(place, BINARY) or ()
        tensors = check_tensors(
            place, BINARY, {path: tensors_of_file(path, place) for path in paths}
        )
        return with_trainer_state(hub_of(self.name, tensors, paths, in_order=True), place, BINARY)

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Check the files against SHA256SUMS if there is one, and check the checksums within each
        archive.
        """
        super().verify(place, used)
        for path in list_files(place, BINARY) or ():
            archive.verify_archive(path, place, used=used)

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return one file, or several files with an index; each tensor has its own storage."""
        parts = divide_into_shards(weights_to_write(hub, target.dtype), target.shard)
        files = [
            torch_save.torch_file(name, OrderedDict(part))
            for name, part in index_files(BINARY, parts)
        ]
        return PlannedFiles(
            (*files, *index_file(BINARY, parts)),
            "SHA256SUMS",
            tuple(only_weights(hub, target.dtype, self.title)),
        )
