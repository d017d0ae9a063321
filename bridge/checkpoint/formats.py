"""Formats of checkpoints: their common interface, and the list of all formats. The formats of a
stack are in the folder of the stack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.checkpoint import digests, moments
from bridge.checkpoint.archive import Used as Used
from bridge.checkpoint.file_tensors import offsets_by_file
from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub, loss_finding
from bridge.checkpoint.lazy import Lazy
from bridge.checkpoint.unpickle import FLAWS
from bridge.errors import SourceError, nearest
from bridge.files.shown import show_value
from bridge.stack import registry
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
    finding for each value that is lost.
    """

    files: tuple[File, ...]
    sums: str
    findings: tuple[Finding, ...] = ()


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
    takes: frozenset[str] = frozenset()
    """Names of the fields of `Wanted` that this format honours in addition to `dtype`, such as
    `ranks` and `level`.
    """
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
        """Compare the files in the folder `place` with the digests in SHA256SUMS, if this file
        exists. Raises a `SourceError` that names each file that has changed. `used` has the
        tensors that are needed: a format with a checksum for each tensor may check only these.
        """
        if (place / digests.SUMS).is_file():
            sums = digests.read_digests(place, place)
            digests.verify_digests(place, place, sums, sums)

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


def all_formats() -> Mapping[str, Format]:
    """Return all formats by name: first those that belong to no stack, then those of the stacks in
    compat/.
    """
    # Imported here, as each of them imports this module for `Format`.
    from bridge.checkpoint.dcp import Dcp
    from bridge.checkpoint.native_format import Native
    from bridge.checkpoint.one_file import OneFile
    from bridge.checkpoint.pytorch_bin import Binary
    from bridge.checkpoint.safetensors_format import Safe

    own: tuple[Format, ...] = (Native(), Safe(), Binary(), Dcp(), OneFile())
    theirs = [format for name in registry.OWN for format in registry.load(name).checkpoints]
    return {format.name: format for format in (*own, *theirs)}


ALIASES = {"huggingface": "safetensors"}
"""Further names of formats: that of the library whose files they are."""


def format_of_name(name: str) -> Format:
    """Return the format `name`. If there is none, raise a `SourceError` that suggests a similar
    name.
    """
    formats = all_formats()
    name = ALIASES.get(name, name)
    if name not in formats:
        raise SourceError(
            f"{name}: found an unknown format of checkpoints, expected one of "
            f"{', '.join(formats)}{nearest(name, formats)}"
        )
    return formats[name]


def find_checkpoint(
    folder: Path, name: str | None = None, root: str | None = None
) -> tuple[Format, Path]:
    """Return the format of the checkpoint in `folder`, and the folder with its files; of a checkpoint
    in one file, the file. `root` chooses the model in it, for formats in which models lie under any
    keys. Raises `SourceError` if there is no checkpoint, or if the files are of several formats and
    `name` does not choose one.
    """
    if not folder.is_dir() and not folder.is_file():
        raise SourceError(f"{folder}: found no folder; name the folder or file of a checkpoint")
    candidates = [format_of_name(name)] if name else list(all_formats().values())
    if folder.is_file():
        candidates = [format for format in candidates if format.one_file]
    format, place = _find_one(folder, candidates)
    if root is None:
        return format, place
    if not isinstance(format, RootedFormat):
        raise SourceError(
            f"--root: found {show_value(root)}; a checkpoint of {format.title} has one model at one place; leave it out"
        )
    return replace(format, root=root), place


def _find_one(folder: Path, candidates: Sequence[Format]) -> tuple[Format, Path]:
    places = [
        (format, place) for format in candidates if (place := format.find(folder)) is not None
    ]
    if not places:
        kinds = ", ".join(format.title for format in candidates)
        raise SourceError(
            f"{folder}: found no checkpoint of {kinds}; {_advice_on_near(folder, candidates)}"
        )
    # Weights that lie in the folder of a whole checkpoint are a copy of its own.
    whole = [(format, place) for format, place in places if not format.weights_only]
    if len(places) > 1 and len(whole) == 1:
        return whole[0]
    if len(places) > 1:
        kinds = ", ".join(format.name for format, _ in places)
        raise SourceError(
            f"{folder}: found checkpoints of several formats ({kinds}); choose one with --from"
        )
    return places[0]


POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
SHOWN, MOST = 5, 200


def _advice_on_near(folder: Path, candidates: Sequence[Format]) -> str:
    """Return advice for the message that `folder` has no checkpoint: it names the folders inside
    that have one, and a pointer file such as `latest` that leads nowhere.
    """
    inside = [
        path for path in sorted(folder.iterdir())[:MOST] if path.is_dir() and not path.is_symlink()
    ]
    names = [
        show_value(path.name)
        for path in inside
        if any(format.find(path) is not None for format in candidates)
    ]
    there = next((pointer for pointer in POINTERS if (folder / pointer).is_file()), None)
    if not names:
        return "name the folder that contains the files of a checkpoint"
    advice = f"these folders in it hold a checkpoint: {', '.join(names[:SHOWN])}; name one of them"
    return f"the file {there} leads to no checkpoint; {advice}" if there else advice


def read_checkpoint(folder: Path, name: str | None = None) -> Hub:
    """Return the checkpoint in `folder`, in the format `name` or in any. Raises `SourceError` if
    there is none, or if it is damaged.
    """
    return read_at(*find_checkpoint(folder, name))


def read_at(format: Format, place: Path) -> Hub:
    """Return the checkpoint of this format in the folder `place`. Raises `SourceError` if it is
    damaged.
    """
    try:
        hub = format.read(place)
        SourceError.raise_if(
            f"{place}: {problem}; the checkpoint is damaged" for problem in _find_damage(hub)
        )
        return hub
    except FLAWS as error:
        # A file may hold any value in any place. What a reader did not look at before it used it
        # ends here, without a traceback.
        raise _damage_error(format, place, error) from error


def _damage_error(format: Format, place: Path, error: Exception) -> SourceError:
    return SourceError(
        f"{place}: expected a checkpoint of {format.title} ({type(error).__name__}: {show_value(str(error))}); the "
        "checkpoint is damaged"
    )


def verify_checkpoint(format: Format, place: Path, files: Sequence[File] | None = None) -> None:
    """Check the checksums of the checkpoint in the folder `place`. If `files` are given, at least
    the tensors that go into these files are checked. Raises `SourceError` if a checksum does not
    match.
    """
    try:
        format.verify(place, None if files is None else offsets_by_file(files))
    except FLAWS as error:
        raise _damage_error(format, place, error) from error


def add_doubts(format: Format, place: Path, hub: Hub) -> Hub:
    """Return the checkpoint with more findings: one if damage cannot be detected, and one for each
    pair of moments that no run can have.
    """
    paths = digests.without_digest(place, hub.origin.files) if format.unseen else []
    there = (place / digests.SUMS).is_file()
    lack = f"has no line for {', '.join(path.name for path in paths)}" if there else "is missing"
    limits = (
        [loss_finding("checksums", f"{digests.SUMS} {lack}: {format.unseen}", Effect.NONE)]
        if paths
        else []
    )
    return replace(hub, findings=(*hub.findings, *limits, *moments.find_impossible(hub)))


def plan_files(format: Format, hub: Hub, target: Wanted) -> PlannedFiles:
    """Return the files that would hold the checkpoint `hub` in this format. Raises `SourceError`
    if it has no tensor, or if a value in it has the wrong type.
    """
    if not hub.parameters and not hub.buffers:
        folder = hub.origin.files[0].parent if hub.origin.files else hub.origin.format
        raise SourceError(
            f"{folder}: found no tensor, expected those of a model; name another folder"
        )
    try:
        return format.plan(hub, target)
    except FLAWS as error:
        why = f"{type(error).__name__}: {show_value(str(error))}"
        raise SourceError(
            f"{hub.origin.format}: this checkpoint is damaged: it has a value of the run's state that {format.title}"
            f" cannot hold ({why})"
        ) from error


def _find_damage(hub: Hub) -> Iterator[str]:
    """Yield a message for each problem that shows a damaged checkpoint: another value in place of
    a tensor, a master or moment with another shape than the weight, or a group or tie with a
    parameter that does not exist.
    """
    rows: Iterable[tuple[Any, str, Any]] = hub.tensors()
    for name, kind, tensor in rows:
        if not isinstance(name, str) or not isinstance(tensor, Lazy):
            yield f"{show_value(name)}: found a {type(tensor).__name__} as {kind}, expected a tensor"
        elif name in hub.parameters and tensor.shape != hub.parameters[name].weight.shape:
            yield (
                f"{show_value(name)}: found shape {tensor.shape} of the {kind}, and"
                f" {hub.parameters[name].weight.shape} of the weight"
            )
    for group in hub.groups:
        yield from (
            f"{show_value(name)} is in a group of the optimizer but not in the model"
            for name in set(group.names) - set(hub.parameters)
        )
    yield from (
        f"{show_value(alias)} is tied to {show_value(name)}, which the model does not have"
        for alias, name in hub.ties.items()
        if name not in hub.parameters
    )


def pointer_target(folder: Path, pointer: str) -> Path | None:
    """Return the folder inside `folder` that the file `pointer`, such as `latest`, names; without
    this file, return `folder` itself. Return None if the file names no existing folder.
    """
    from bridge.files.contained import SMALL, inside, plain, read_text

    path = folder / pointer
    if not path.is_file():
        return folder
    place = inside(folder / plain(read_text(path, folder, SMALL).strip(), path), folder)
    return place if place.is_dir() else None


def findings_that_matter(format: Format, hub: Hub) -> tuple[Finding, ...]:
    """Return the findings on the source checkpoint that matter in this format. One that holds
    weights alone lacks nothing if the source has no moments either.
    """
    return tuple(
        finding
        for finding in hub.findings
        if not (format.weights_only and finding.path == "moments" and not hub.moments)
    )


def only_weights(hub: Hub, dtype: str | None, format: str) -> Iterator[Finding]:
    """Yield a finding for each value that a format without optimizer states loses. `dtype` is the
    number format in which weights are written; None: that of each weight.
    """
    format_of_weights = dtype or hub.weight_dtype
    if any(
        parameter.best.dtype != (dtype or parameter.weight.dtype)
        for parameter in hub.parameters.values()
    ):
        yield loss_finding(
            "masters",
            f"{format} has one copy of each weight, here in {format_of_weights}; the greater precision of the "
            "masters is lost",
            Effect.NUMBERS,
        )
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
