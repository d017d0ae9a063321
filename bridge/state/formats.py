"""Formats of checkpoints: what each can be asked, and which there are; those of a stack lie in the stack's own folder."""

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
    """What the user asks of the files: number format of the weights, data ranks, ZeRO level, and
    bytes of a file at most.

    None: as the source has it.
    """

    dtype: str | None = None
    ranks: int | None = None
    level: int | None = None
    shard: int = 5 * GIGABYTE


@dataclass(frozen=True)
class Written:
    """The files to write, the name of the file with their digests, and findings for all of the hub
    that they do not hold.
    """

    files: tuple[File, ...]
    sums: str
    findings: tuple[Finding, ...] = ()


class Format(ABC):
    """One format of checkpoints."""

    name: str
    title: str
    fixed: bool = False
    """Whether only as many ranks load a checkpoint as saved it."""
    names: str | None = None
    """The naming (`bridge.state.names`) that its readers expect, if they expect one."""
    takes: frozenset[str] = frozenset()
    """The fields of `Wanted` beside `dtype` that change its files: `ranks`, `level`."""
    unseen: str = ""
    """Damage that its files do not show without SHA256SUMS beside them."""

    @abstractmethod
    def find(self, folder: Path) -> Path | None:
        """The folder that holds a checkpoint of this format: `folder`, or the one that a file in it
        names; None without one.
        """

    @abstractmethod
    def read(self, place: Path) -> Hub:
        """The checkpoint in a folder that `find` returned. Raises `SourceError`."""

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Compare the files in `place` with the digests beside them. Raises `SourceError` that
        names each file that changed.

        With `used`, a format that has a checksum for each tensor may check the used tensors alone.
        """
        if (place / digests.SUMS).is_file():
            found = digests.read(place, place)
            digests.verify(place, place, found, found)

    def plan(self, hub: Hub, wanted: Wanted) -> Written:
        """The files that would hold `hub`; `SourceError` if this format cannot."""
        raise SourceError(f"{self.name}: {self.title} is read, not written; choose another format")


def known() -> Mapping[str, Format]:
    """Every format by name: those that belong to no stack, then those of the stacks in compat/."""
    # Imported here, as each of them imports this module for `Format`.
    from bridge.state.binary import Binary
    from bridge.state.dcp import Dcp
    from bridge.state.native import Native
    from bridge.state.safe import Safe

    own: tuple[Format, ...] = (Native(), Safe(), Binary(), Dcp())
    theirs = [format for name in stacks.OWN for format in stacks.load(name).checkpoints]
    return {format.name: format for format in (*own, *theirs)}


def named(name: str) -> Format:
    """The format of that name. Raises `SourceError` with the nearest."""
    found = known()
    if name not in found:
        raise SourceError(
            f"{name}: no format of checkpoints; known are {', '.join(found)}{nearest(name, found)}"
        )
    return found[name]


def found(folder: Path, name: str | None = None) -> tuple[Format, Path]:
    """The format of the checkpoint in `folder`, and the folder that holds it.

    Raises `SourceError` if there is none, or if it is of several formats and `name` does not choose
    one.
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
            f"{folder}: checkpoints of several formats ({kinds}); say which with --from"
        )
    return places[0]


POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
SHOWN, MOST = 5, 200


def _near(folder: Path, tried: Sequence[Format]) -> str:
    """Advice: the folders in `folder` that hold a checkpoint, and the pointer that leads to none of
    them.
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
        return "name the folder that its files lie in"
    why = f"{there} does not lead to one, but " if there else ""
    return f"{why}these folders in it are: {', '.join(names[:SHOWN])}; name one of them"


def read(folder: Path, name: str | None = None) -> Hub:
    """The checkpoint in `folder`. Raises `SourceError`."""
    return read_at(*found(folder, name))


def read_at(format: Format, place: Path) -> Hub:
    """The checkpoint that `found` returned. Raises `SourceError` if anything in it has another form
    than the format gives it.
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
    """Check a checkpoint's checksums, or at least those of what `files` are made of. Raises
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
    """The checkpoint with two more kinds of findings: values that no run of Adam has, and damage
    that no check can see.
    """
    unseen = format.unseen and not (place / digests.SUMS).is_file()
    limits = (
        [lost("checksums", f"{digests.SUMS} is not there: {format.unseen}", Effect.NONE)]
        if unseen
        else []
    )
    return replace(hub, findings=(*hub.findings, *limits, *moments.impossible(hub)))


def planned(format: Format, hub: Hub, wanted: Wanted) -> Written:
    """The files that would hold `hub`. Raises `SourceError` if the source has a value of the wrong
    kind beside its tensors.
    """
    try:
        return format.plan(hub, wanted)
    except FLAWS as error:
        why = f"{type(error).__name__}: {shown(str(error))}"
        said = f"{hub.origin.format}: {format.title} cannot hold what it says of the run ({why})"
        raise SourceError(f"{said}; the checkpoint is damaged") from error


def _unsound(hub: Hub) -> Iterator[str]:
    """Problems that no sound checkpoint has: values in place of tensors, copies of another shape,
    groups and ties that name parameters which are not there.
    """
    rows: Iterable[tuple[Any, str, Any]] = hub.tensors()
    for name, kind, held in rows:
        if not isinstance(name, str) or not isinstance(held, Lazy):
            yield f"{shown(name)}: its {kind} is a {type(held).__name__}, expected a tensor"
        elif name in hub.parameters and held.shape != hub.parameters[name].weight.shape:
            yield f"{shown(name)}: its {kind} has shape {held.shape}, its weight {hub.parameters[name].weight.shape}"
    for group in hub.groups:
        yield from (
            f"{shown(name)} is in a group of the optimizer and not in the model"
            for name in set(group.names) - set(hub.parameters)
        )
    yield from (
        f"{shown(alias)} is tied to {shown(name)}, which is not there"
        for alias, name in hub.ties.items()
        if name not in hub.parameters
    )


def pointed(folder: Path, pointer: str) -> Path | None:
    """The folder in `folder` that the file `pointer`, such as `latest`, names; `folder` itself if
    there is no such file.

    None if the file names no folder.
    """
    from bridge.files.contained import SMALL, inside, plain, read_text

    path = folder / pointer
    if not path.is_file():
        return folder
    place = inside(folder / plain(read_text(path, folder, SMALL).strip(), path), folder)
    return place if place.is_dir() else None


def only_weights(hub: Hub, dtype: str | None, format: str) -> Iterator[Finding]:
    """Findings for what a format of weights alone loses. The weights are written in `dtype`, or as
    they are.
    """
    written = dtype or hub.computed
    if any(held.best.dtype != (dtype or held.weight.dtype) for held in hub.parameters.values()):
        yield lost(
            "masters",
            f"{format} has one copy of a weight, here {written}; what the masters have beyond is lost",
            Effect.NUMBERS,
        )
    if hub.moments:
        yield lost(
            "moments",
            f"{', '.join(hub.moments)}: {format} has no optimizer; a run from it begins them anew",
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
                f"{format} has no place for it; a run from it begins at its start",
                Effect.NUMBERS,
            )
    if hub.client:
        yield lost("client", f"{', '.join(hub.client)}: {format} has no place for it", Effect.NONE)
