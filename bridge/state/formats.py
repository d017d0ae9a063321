"""Formats of checkpoints: the interface, and the list of formats.

Formats of a stack are in the stack's own folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge import stacks
from bridge.config import shown
from bridge.errors import SourceError, nearest
from bridge.findings import Finding
from bridge.rules import Effect
from bridge.state import digests, moments
from bridge.state.archive import Used as Used
from bridge.state.files import File
from bridge.state.hub import Hub, lost
from bridge.state.lazy import Lazy
from bridge.state.making import used
from bridge.state.pickled import FLAWS

GIGABYTE = 2**30


@dataclass(frozen=True)
class Wanted:
    """The user's wishes for the files: number format of the weights, number of data ranks, ZeRO
    level, and largest size of a file in bytes.

    None stands for the value of the source.
    """

    dtype: str | None = None
    ranks: int | None = None
    level: int | None = None
    shard: int = 5 * GIGABYTE


@dataclass(frozen=True)
class Written:
    """The files to write, the name of the file with digests, and a finding for each loss."""

    files: tuple[File, ...]
    sums: str
    findings: tuple[Finding, ...] = ()


class Format(ABC):
    """One format of checkpoints."""

    name: str
    title: str
    fixed: bool = False
    """Whether a checkpoint can be loaded only by the number of ranks that saved it."""
    names: str | None = None
    """Name of the parameter naming (`bridge.state.names`) that readers of this format expect; None if they accept any."""
    takes: frozenset[str] = frozenset()
    """Fields of `Wanted`, in addition to `dtype`, that change the files of this format, such as `ranks` and `level`."""
    unseen: str = ""
    """Text for messages: the kind of damage that is not detected without SHA256SUMS."""

    @abstractmethod
    def find(self, folder: Path) -> Path | None:
        """Return the folder with a checkpoint of this format: `folder`, or a folder that a file in
        it names; None if there is none.
        """

    @abstractmethod
    def read(self, place: Path) -> Hub:
        """Return the checkpoint in a folder that `find` returned. Raises `SourceError`."""

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Compare the files in `place` with the digests in SHA256SUMS.

        Raises a `SourceError` that names each changed file. With `used`, a format that has a
        checksum for each tensor may check only the used tensors.
        """
        if (place / digests.SUMS).is_file():
            found = digests.read(place, place)
            digests.verify(place, place, found, found)

    def plan(self, hub: Hub, wanted: Wanted) -> Written:
        """Return the files that would hold `hub`.

        Raises `SourceError` if this format cannot hold it.
        """
        raise SourceError(
            f"{self.name}: {self.title} can be read but not written; choose another format"
        )


def known() -> Mapping[str, Format]:
    """Return every format by name: first formats that belong to no stack, then the formats of the stacks in compat/."""
    # Imported here, as each of them imports this module for `Format`.
    from bridge.state.binary import Binary
    from bridge.state.dcp import Dcp
    from bridge.state.native import Native
    from bridge.state.safe import Safe

    own: tuple[Format, ...] = (Native(), Safe(), Binary(), Dcp())
    theirs = [format for name in stacks.OWN for format in stacks.load(name).checkpoints]
    return {format.name: format for format in (*own, *theirs)}


def named(name: str) -> Format:
    """Return the format with that name. Raises a `SourceError` that suggests the nearest name."""
    found = known()
    if name not in found:
        raise SourceError(
            f"{name}: unknown format of checkpoints; known are "
            f"{', '.join(found)}{nearest(name, found)}"
        )
    return found[name]


def found(folder: Path, name: str | None = None) -> tuple[Format, Path]:
    """Return the format of the checkpoint in `folder`, and the folder with its files.

    Raises `SourceError` if there is no checkpoint, or if there are several formats and `name` does
    not choose one.
    """
    if not folder.is_dir():
        raise SourceError(f"{folder}: no folder there; name the folder of a checkpoint")
    tried = [named(name)] if name else list(known().values())
    places = [(format, place) for format in tried if (place := format.find(folder)) is not None]
    if not places:
        kinds = ", ".join(format.title for format in tried)
        raise SourceError(f"{folder}: no checkpoint of {kinds} there; {_near(folder, tried)}")
    if len(places) > 1:
        kinds = ", ".join(format.name for format, _ in places)
        raise SourceError(
            f"{folder}: checkpoints of several formats ({kinds}); choose one with --from"
        )
    return places[0]


POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
SHOWN, MOST = 5, 200


def _near(folder: Path, tried: Sequence[Format]) -> str:
    """Return advice for messages: the folders inside `folder` that contain a checkpoint, and a
    pointer file that names no checkpoint.
    """
    inside = [
        path for path in sorted(folder.iterdir())[:MOST] if path.is_dir() and not path.is_symlink()
    ]
    names = [
        shown(path.name)
        for path in inside
        if any(format.find(path) is not None for format in tried)
    ]
    there = next((pointer for pointer in POINTERS if (folder / pointer).is_file()), None)
    if not names:
        return "name the folder that contains its files"
    why = f"{there} does not name one, but " if there else ""
    return f"{why}these folders hold one: {', '.join(names[:SHOWN])}; name one of them"


def read(folder: Path, name: str | None = None) -> Hub:
    """Return the checkpoint in `folder`. Raises `SourceError`."""
    return read_at(*found(folder, name))


def read_at(format: Format, place: Path) -> Hub:
    """Return the checkpoint that `found` located.

    Raises `SourceError` if a part of it does not have the form of the format.
    """
    try:
        hub = format.read(place)
        SourceError.raise_if(
            f"{place}: {problem}; the checkpoint is damaged" for problem in _unsound(hub)
        )
        return hub
    except FLAWS as error:
        # A file may hold any value in any place. What a reader did not look at before it used it
        # ends here, without a traceback.
        said = (
            f"{place}: not as {format.title} has it ({type(error).__name__}: {shown(str(error))})"
        )
        raise SourceError(f"{said}; the checkpoint is damaged") from error


def verified(format: Format, place: Path, files: Sequence[File] | None = None) -> None:
    """Check the checksums of a checkpoint.

    With `files`, at least the tensors that are written into these files are checked. Raises
    `SourceError`.
    """
    try:
        format.verify(place, None if files is None else used(files))
    except FLAWS as error:
        said = (
            f"{place}: not as {format.title} has it ({type(error).__name__}: {shown(str(error))})"
        )
        raise SourceError(f"{said}; the checkpoint is damaged") from error


def doubted(format: Format, place: Path, hub: Hub) -> Hub:
    """Return the checkpoint with findings added: moments that no run can have, and the kinds of damage that are not detected."""
    unseen = format.unseen and not (place / digests.SUMS).is_file()
    limits = (
        [lost("checksums", f"{digests.SUMS} is missing: {format.unseen}", Effect.NONE)]
        if unseen
        else []
    )
    return replace(hub, findings=(*hub.findings, *limits, *moments.impossible(hub)))


def planned(format: Format, hub: Hub, wanted: Wanted) -> Written:
    """Return the files that would hold `hub`.

    Raises `SourceError` if a value of the source has the wrong type.
    """
    try:
        return format.plan(hub, wanted)
    except FLAWS as error:
        why = f"{type(error).__name__}: {shown(str(error))}"
        said = f"{hub.origin.format}: {format.title} cannot hold its values about the run ({why})"
        raise SourceError(f"{said}; the checkpoint is damaged") from error


def _unsound(hub: Hub) -> Iterator[str]:
    """Yield the problems of a damaged checkpoint: values in place of tensors, copies of wrong
    shape, and groups and ties with names of parameters that do not exist.
    """
    rows: Iterable[tuple[Any, str, Any]] = hub.tensors()
    for name, kind, held in rows:
        if not isinstance(name, str) or not isinstance(held, Lazy):
            yield f"{shown(name)}: its {kind} is a {type(held).__name__}, expected a tensor"
        elif name in hub.parameters and held.shape != hub.parameters[name].weight.shape:
            yield f"{shown(name)}: its {kind} has shape {held.shape}, its weight {hub.parameters[name].weight.shape}"
    for group in hub.groups:
        yield from (
            f"{shown(name)} is in a group of the optimizer but not in the model"
            for name in set(group.names) - set(hub.parameters)
        )
    yield from (
        f"{shown(alias)} is tied to {shown(name)}, which does not exist"
        for alias, name in hub.ties.items()
        if name not in hub.parameters
    )


def pointed(folder: Path, pointer: str) -> Path | None:
    """Return the folder inside `folder` that the file `pointer`, such as `latest`, names.

    Without that file, return `folder`. Return None if the file names no folder.
    """
    from bridge.files.contained import SMALL, inside, plain, read_text

    path = folder / pointer
    if not path.is_file():
        return folder
    place = inside(folder / plain(read_text(path, folder, SMALL).strip(), path), folder)
    return place if place.is_dir() else None


def only_weights(hub: Hub, dtype: str | None, format: str) -> Iterator[Finding]:
    """Yield findings on the losses of a format without optimizer states.

    `dtype` is the format in which the weights are written; None: the format that they have.
    """
    written = dtype or hub.computed
    if any(held.best.dtype != (dtype or held.weight.dtype) for held in hub.parameters.values()):
        yield lost(
            "masters",
            f"{format} has one copy of a weight, here {written}; the greater precision of the "
            "masters is lost",
            Effect.NUMBERS,
        )
    if hub.moments:
        yield lost(
            "moments",
            f"{', '.join(hub.moments)}: {format} has no optimizer states; a run from it starts "
            "with new ones",
            Effect.NUMBERS,
        )
    for name, value in (
        ("step", hub.where.steps),
        ("schedule", hub.schedule),
        ("scale", hub.scale),
    ):
        if value:
            yield lost(
                name,
                f"{format} has no place for it; a run from it begins with its initial value",
                Effect.NUMBERS,
            )
    if hub.client:
        yield lost("client", f"{', '.join(hub.client)}: {format} has no place for it", Effect.NONE)
