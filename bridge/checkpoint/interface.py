"""What a format of checkpoints does: finds a checkpoint, reads it into the hub, verifies it, and plans the
files to write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoint import digests
from bridge.checkpoint.archive import Used
from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub, loss_finding
from bridge.checkpoint.lazy import EXACT
from bridge.errors import SourceError
from bridge.files.contained import SMALL, find_flaw_of_path, path_inside, plain, read_text
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

GIGABYTE = 2**30


@dataclass(frozen=True)
class Wanted:
    """How the user wants the files: number format of the weights, number of data ranks, ZeRO level,
    and maximum size of a file in bytes. None means: as in the source checkpoint.
    """

    dtype: str | None = None
    ranks: int | None = None
    level: int | None = None
    shard: int = 5 * GIGABYTE


@dataclass(frozen=True)
class PlannedFiles:
    """What a format plans to write: the files, the name of the file with their digests, and a
    finding for each value that is lost. Raises `SourceError` for a file outside the folder, or with a
    name that no file can have: formats make names of files of the names of tensors.
    """

    files: tuple[File, ...]
    sums: str
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        SourceError.raise_if(
            f"{show_value(file.name)}: {problem}; rename the tensor whose name this is"
            for file in self.files
            if (problem := find_flaw_of_path(file.name))
        )


class Format(ABC):
    """One format of checkpoints."""

    name: str
    title: str
    fixed: bool = False
    """Whether a checkpoint can be loaded only on the number of ranks that saved it."""
    names: str | None = None
    """Name of the naming of parameters (`bridge.checkpoint.parameter_names`) that stacks expect in this format;
    None if they accept any.
    """
    takes: frozenset[str] = frozenset({"dtype"})
    """Names of the options for the numbers and the layout (`dtype`, `ranks`, `level`) that this format honours."""
    weights_only: bool = False
    """Whether the format holds weights alone, as transformers reads them, and nothing that a run resumes from."""
    one_file: bool = False
    """Whether a checkpoint is a file instead of a folder."""
    unseen: str = ""
    """Words for a finding: the damage that cannot be detected in this format if SHA256SUMS is
    missing.
    """

    @abstractmethod
    def find(self, folder: Path) -> Path | None:
        """Return the folder of a checkpoint of this format: `folder` itself, or a folder in it
        that a file such as `latest` names. Return None if there is no such checkpoint.
        """

    @abstractmethod
    def read(self, place: Path) -> Hub:
        """Return the checkpoint in the folder `place`, which `find` returned. Raises `SourceError`
        if it is damaged.
        """

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Compare the files in `place` with the digests in SHA256SUMS, if this file
        exists, and with those that blobs have for names. Raises a `SourceError` that names each file that has
        changed. `used` has the tensors that are needed: a format with a checksum for each tensor may check
        only these.
        """
        sums = digests.read_digests(place, place) if (place / digests.SUMS).is_file() else {}
        for one in (sums, digests.blob_digests(place)):
            digests.verify_digests(place, place, one, one)

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return the files that would hold the checkpoint `hub`. Raises `SourceError` if this
        format cannot hold it.
        """
        raise SourceError(
            f"{self.name}: checkpoints of {self.title} can be read but not written; choose another format"
        )


@dataclass(frozen=True)
class RootedFormat(Format):
    """A format in which a model may lie under any keys. `root` has those of the model to be read, joined by
    dots; None if there is only one that may be meant.
    """

    root: str | None = None


def pointer_target(folder: Path, pointer: str) -> Path | None:
    """Return the folder inside `folder` that the file `pointer`, such as `latest`, names; without
    this file, return `folder` itself. Return None if the file names no existing folder.
    """
    path = folder / pointer
    if not path.is_file():
        return folder
    place = path_inside(folder / plain(read_text(path, folder, SMALL).strip(), path), folder)
    return place if place.is_dir() else None


def coarser_weights(hub: Hub, dtype: str | None, format: str) -> Iterator[Finding]:
    """Yield a finding if the one copy of each weight that is written is coarser than the best one of
    the source. `dtype` is the number format in which weights are written; None: that of each weight.
    """
    format_of_weights = dtype or hub.weight_dtype
    if any(
        parameter.best.dtype not in (own := dtype or parameter.weight.dtype, *EXACT.get(own, ()))
        for parameter in hub.parameters.values()
    ):
        yield loss_finding(
            "masters",
            f"{format} has one copy of each weight, here in {format_of_weights}; the greater precision of the "
            "masters is lost",
            Effect.NUMBERS,
        )


def only_weights(hub: Hub, dtype: str | None, format: str) -> Iterator[Finding]:
    """Yield a finding for each value that a format without optimizer states loses. `dtype` is the
    number format in which weights are written; None: that of each weight.
    """
    yield from coarser_weights(hub, dtype, format)
    if hub.moments:
        yield loss_finding(
            "moments",
            f"{', '.join(hub.moments)}: {format} has no optimizer states; a run that loads this "
            "checkpoint starts with new ones",
            Effect.NUMBERS,
        )
    for name, value in (
        ("step", hub.where.steps),
        ("schedule", hub.schedule),
        ("scale", hub.scale),
    ):
        if value:
            yield loss_finding(
                name,
                f"{format} cannot hold the {name}; a run that loads this checkpoint begins with the initial {name}",
                Effect.NUMBERS,
            )
    if hub.client:
        yield loss_finding(
            "client",
            f"{format} cannot hold these values of the script: {', '.join(hub.client)}",
            Effect.NONE,
        )
